"""The official values (tests/data/README.md says how they were made)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from egovideo import MotionAdapter, clip_loss, in_batch_accuracy, inject, resample_frames, segment_ids
from egovideo.checkpoints import convert_official

DATA = Path(__file__).parent / "data"


def test_frame_ids():
    for case in json.loads((DATA / "frame_ids.json").read_text(encoding="utf-8")):
        assert segment_ids(case["start"], case["end"], case["n"]).tolist() == case["ids"]


def test_infonce_value_and_gradients():
    golden = np.load(DATA / "infonce.npz")
    video, text = (torch.tensor(golden[name], requires_grad=True) for name in "vt")
    loss = clip_loss(video, text, float(golden["scale"]))
    loss.backward()
    assert loss.item() == pytest.approx(float(golden["loss"]), abs=1e-9)
    assert in_batch_accuracy(video, text) * 100 == pytest.approx(float(golden["acc"]), abs=1e-4)
    assert np.abs(video.grad.numpy() - golden["grad_v"]).max() < 1e-9
    assert np.abs(text.grad.numpy() - golden["grad_t"]).max() < 1e-9


def test_temporal_embedding():
    golden = np.load(DATA / "temporal_embed_4_16.npz")
    made = resample_frames(torch.tensor(golden["src"]), 16)
    assert np.abs(made.numpy() - golden["dst"]).max() < 1e-12


def test_adapter(formula):
    golden = np.load(DATA / "adapter.npz")
    hidden, dim = 384, 768
    shapes = {
        "conv.weight": (hidden, hidden, 1),
        "conv2d.weight": (hidden, hidden, 3, 3),
        "down_proj.weight": (hidden, dim),
        "dwconv.weight": (hidden, 1, 3),
        "up_proj.weight": (dim, hidden),
        "up_proj.bias": (dim,),
        "gamma": (),
    }
    official = {}
    for rank, name in enumerate(golden["names"].tolist()):
        kind = "gamma" if name == "gamma" else name.rpartition(".")[2]
        shape = shapes.get(name, (hidden,))
        official[f"visual.transformer.resblocks.0.adapter.{name}"] = formula(rank, shape, kind)
    converted = convert_official(official)
    assert len(converted.unused) == 2  # conv2d
    assert not converted.unknown
    prefix = "vision_model.encoder.layers.0.motion_adapter."
    adapter = MotionAdapter(dim).double()
    adapter.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in converted.vision.items()})
    x = torch.from_numpy(np.sin(0.7 * np.arange(2 * 785 * dim))).reshape(2, 785, dim)
    with torch.no_grad():
        y = adapter(x, num_frames=int(golden["T"]))
    delta = (y - x)[:, 0]
    assert torch.equal(delta, torch.zeros_like(delta))
    assert np.abs(golden["delta_cls"]).max() == 0
    y = y.numpy()
    candidates = [y[:, ::97, ::61], (y - x.numpy())[:, ::97, ::61]]
    assert min(np.abs(each - golden["y"]).max() for each in candidates) < 1e-9
    assert y.mean() == pytest.approx(float(golden["mean"]), abs=1e-9)
    assert (y**2).mean() == pytest.approx(float(golden["sq"]), abs=1e-9)


@pytest.mark.parametrize(("file", "frames"), [("video_tower.npz", 4), ("video_tower_interp.npz", 8)])
def test_video_tower(formula, file, frames):
    transformers = pytest.importorskip("transformers")
    golden = np.load(DATA / file)
    width, patch, out, stored, tokens = 64, 16, 24, 4, 5
    shapes = {
        "class_embedding": (width,),
        "conv1.weight": (width, 3, patch, patch),
        "image_projection": (width, out),
        "positional_embedding": (tokens, width),
        "temporal_embedding": (stored, width),
        "attn.in_proj_bias": (3 * width,),
        "attn.in_proj_weight": (3 * width, width),
        "attn.out_proj.weight": (width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_proj.weight": (width, 4 * width),
    }
    official = {}
    for rank, name in enumerate(golden["names"].tolist()):
        part = ".".join(name.split(".")[3:]) if name.startswith("transformer.") else name
        is_norm = part.startswith("ln_") and part.endswith(".weight")
        is_weight = part.endswith("weight") or part == "image_projection"
        kind = "norm" if is_norm else "weight" if is_weight else "other"
        official[name] = formula(rank, shapes.get(part, (width,)), kind)
    converted = convert_official(official)
    assert not converted.unknown
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=patch,
        projection_dim=out,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )
    tower = inject(transformers.CLIPVisionModelWithProjection(config).double().eval(), num_frames=stored)
    missing, unexpected = tower.load_state_dict(converted.vision, strict=False)
    assert not unexpected
    assert all("motion_adapter" in name or "position_ids" in name for name in missing)
    k = np.arange(2 * 3 * frames * 32 * 32)
    clips = torch.from_numpy(np.sin(0.013 * k) + 0.5 * np.sin(0.7 * k)).reshape(2, 3, frames, 32, 32)
    with torch.no_grad():
        y = tower(pixel_values=clips.transpose(1, 2)).image_embeds
    assert np.abs(y.numpy() - golden["y"]).max() < 1e-9
