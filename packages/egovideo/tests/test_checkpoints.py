"""Official names to ours, there and back."""

import argparse

import pytest
import torch

from egovideo import EgoVideo, load_official
from egovideo.checkpoints import convert_official, official_vision_config, read_checkpoint

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def model():
    vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL, image_size=32, patch_size=16))
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**SMALL, vocab_size=99, eos_token_id=98, max_position_embeddings=12)
    )
    return EgoVideo(vision, text, slow_frames=4, fast_frames=8, embed_dim=16)


def blocks(prefix, seed):
    g = torch.Generator().manual_seed(seed)
    made = {}
    for i in range(2):
        shapes = {
            "attn.in_proj_weight": (96, 32), "attn.in_proj_bias": (96,), "attn.out_proj.weight": (32, 32), "attn.out_proj.bias": (32,),
            "ln_1.weight": (32,), "ln_1.bias": (32,), "ln_2.weight": (32,), "ln_2.bias": (32,), "mlp.c_fc.weight": (64, 32),
            "mlp.c_fc.bias": (64,), "mlp.c_proj.weight": (32, 64), "mlp.c_proj.bias": (32,),
        }  # fmt: skip
        if prefix.startswith("visual"):
            adapter = {
                "down_proj.weight": (16, 32), "down_proj.bias": (16,), "dwconv.weight": (16, 1, 3, 1, 1), "dwconv.bias": (16,),
                "conv.weight": (16, 16, 1, 1, 1), "conv.bias": (16,), "up_proj.weight": (32, 16), "up_proj.bias": (32,), "gamma": (1,),
                "conv2d.weight": (16, 16, 3, 3),
            }  # fmt: skip
            shapes |= {f"{owner}.{k}": v for owner in ("adapter", "adapter_2") for k, v in adapter.items()}
        made |= {f"{prefix}transformer.resblocks.{i}.{k}": torch.randn(v, generator=g) for k, v in shapes.items()}
    return made


def official(wrapper="module."):
    g = torch.Generator().manual_seed(9)
    other = {
        "visual.conv1.weight": (32, 3 * 16 * 16), "visual.class_embedding": (32,), "visual.positional_embedding": (5, 32),
        "visual.temporal_embedding": (4, 32), "visual.ln_pre.weight": (32,), "visual.ln_pre.bias": (32,), "visual.ln_post.weight": (32,),
        "visual.ln_post.bias": (32,), "visual.image_projection": (32, 16), "textual.token_embedding.weight": (99, 32),
        "textual.positional_embedding": (12, 32), "textual.ln_final.weight": (32,), "textual.ln_final.bias": (32,),
        "textual.text_projection": (32, 16), "logit_scale": (), "something.new": (3,),
    }  # fmt: skip
    weights = {k: torch.randn(v, generator=g) for k, v in other.items()} | blocks("visual.", 1) | blocks("textual.", 2)
    return {wrapper + name: tensor for name, tensor in weights.items()}


def test_every_weight_of_the_towers_is_filled():
    made, given = model(), official()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    report = load_official(made, given)
    same = {name for name, tensor in made.state_dict().items() if torch.equal(tensor, before[name])}
    assert same == {"fast_projection.weight", "fusion.weight"}  # not in the official file
    assert report.unknown == ["something.new"]
    assert all("adapter_2" in name or "conv2d" in name for name in report.unused)
    assert len(report.unused) == 2 * 11
    in_proj = given["module.visual.transformer.resblocks.1.attn.in_proj_weight"]
    assert torch.equal(made.vision.model.encoder.layers[1].self_attn.k_proj.weight, in_proj[32:64])
    assert torch.equal(made.slow_projection.weight, given["module.visual.image_projection"].T)
    adapter = made.vision.model.encoder.layers[0].motion_adapter
    assert torch.equal(
        adapter.time.weight, given["module.visual.transformer.resblocks.0.adapter.dwconv.weight"].flatten(1)[:, None]
    )


def test_text_names_without_a_prefix():
    bare = {name.replace("module.", "").replace("textual.", ""): tensor for name, tensor in official().items()}
    assert convert_official(bare).text.keys() == convert_official(official()).text.keys()


def test_a_file_of_another_size_is_refused():
    wide = dict(official().items())
    wide["module.visual.class_embedding"] = torch.zeros(64)
    with pytest.raises(
        ValueError, match=r"does not fit the model: embeddings\.class_embedding is \(64,\) there, \(32,\) here"
    ):
        load_official(model(), wide)


def test_checkpoint_files(tmp_path):
    path = tmp_path / "official.pt"
    torch.save({"state_dict": official(), "epoch": 3, "args": argparse.Namespace(lr=1.0)}, path)
    assert load_official(model(), path).unknown == ["something.new"]
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match="holds no weights"):
        read_checkpoint(path)

    class Payload:
        def __reduce__(self):
            return (print, ("this must not run",))

    torch.save({"state_dict": Payload()}, path)
    with pytest.raises(Exception, match="Weights only load failed"):
        read_checkpoint(path)
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in official().items()}, tmp_path / "official.safetensors")
    assert load_official(model(), tmp_path / "official.safetensors").unknown == ["something.new"]


def test_the_official_towers_settings():
    config = official_vision_config(image_size=336)
    assert (config.hidden_act, config.layer_norm_eps, config.image_size, config.patch_size) == ("gelu", 1e-6, 336, 16)
