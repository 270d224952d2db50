"""The motion adapter alone, and inside models of timm, transformers and open_clip."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from egovideo import MotionAdapter, adapter_parameters, eject, inject, load_adapter, save_adapter
from egovideo.tower import VideoTower

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 16,
}


def shaken(adapter):
    """No longer the identity."""
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return adapter


def reference(adapter, x, frames, prefix):
    """The definition, with torch's own convolutions on transposed copies."""
    a = F.gelu(adapter.down(x[:, prefix:]))
    clips, tokens, hidden = a.shape
    space = tokens // frames
    s = a.reshape(clips, frames, space, hidden)
    if adapter.variant == "spatiotemporal":
        side = math.isqrt(space)
        pictures = s.reshape(clips * frames, side, side, hidden).permute(0, 3, 1, 2)
        s = adapter.spatial(pictures).permute(0, 2, 3, 1).reshape(clips, frames, space, hidden)
    over_time = adapter.time(s.permute(0, 2, 3, 1).reshape(clips * space, hidden, frames))
    m = adapter.mix(over_time.transpose(1, 2)).reshape(clips, space, frames, hidden).transpose(1, 2)
    delta = adapter.up(a + m.reshape(clips, tokens, hidden))
    return torch.cat([x[:, :prefix], x[:, prefix:] + adapter.gamma * delta], 1)


@pytest.mark.parametrize("variant", ["temporal", "spatiotemporal"])
@pytest.mark.parametrize(("frames", "kernel", "prefix"), [(1, 3, 1), (2, 3, 0), (5, 3, 2), (4, 5, 1), (3, 7, 1)])
def test_equals_the_definition(variant, frames, kernel, prefix):
    torch.manual_seed(0)
    adapter = shaken(MotionAdapter(12, variant=variant, kernel=kernel)).double()
    x = torch.randn(2, prefix + frames * 9, 12, dtype=torch.float64)
    assert torch.allclose(adapter(x, frames, prefix), reference(adapter, x, frames, prefix), atol=1e-12)


@pytest.mark.parametrize("variant", ["temporal", "spatiotemporal"])
def test_a_fresh_adapter_is_the_identity(variant):
    x = torch.randn(2, 1 + 3 * 4, 8)
    assert torch.equal(MotionAdapter(8, variant=variant)(x, 3), x)


def test_prefix_tokens_pass_untouched_and_the_input_is_not_written():
    adapter = shaken(MotionAdapter(8))
    x = torch.randn(2, 3 + 2 * 4, 8)
    before = x.clone()
    y = adapter(x, 2, prefix_tokens=3)
    assert torch.equal(x, before)
    assert torch.equal(y[:, :3], x[:, :3])
    assert not torch.allclose(y[:, 3:], x[:, 3:])


def test_gradients():
    torch.manual_seed(0)
    adapter = shaken(MotionAdapter(4, variant="spatiotemporal")).double().eval()
    x = torch.randn(1, 1 + 3 * 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: adapter(z, 3), (x,))


def test_frames_layout_equals_joint_layout():
    adapter = shaken(MotionAdapter(8))
    joint = torch.randn(2, 3 * 4, 8)
    frames = joint.reshape(6, 4, 8)
    a = adapter(joint, 3, 0)
    b = adapter(frames, 3, 0, "frame")
    assert torch.allclose(a, b.reshape(2, 12, 8), atol=1e-6)


def test_only_time_mixes_in_the_temporal_variant():
    adapter = shaken(MotionAdapter(8))
    x = torch.randn(1, 4 * 9, 8)
    other = x.clone()
    other[0, 9 * 1 + 4] += 1.0  # frame 1, the middle token
    changed = (adapter(x, 4, 0) - adapter(other, 4, 0)).abs().sum(-1).reshape(4, 9) > 1e-6
    assert changed[:3, 4].all()
    assert changed.sum() == 3


def test_non_square_grid():
    with pytest.raises(ValueError, match=r"a frame has 6 tokens, which is no 2 x 2 grid: pass grid"):
        MotionAdapter(8, variant="spatiotemporal")(torch.randn(1, 12, 8), 2, 0)
    assert MotionAdapter(8, variant="spatiotemporal", grid=(2, 3))(torch.randn(1, 12, 8), 2, 0).shape == (1, 12, 8)


@pytest.mark.parametrize("tokens", [1 + 7, 1, 0])
def test_tokens_that_are_no_clip(tokens):
    with pytest.raises(ValueError, match=rf"x is \(1, {tokens}, 8\) but num_frames=2, prefix_tokens=1"):
        MotionAdapter(8)(torch.randn(1, tokens, 8), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio must be positive"),
        ({"kernel": 2}, "kernel must be odd"),
        ({"kernel": 0}, "kernel must be >= 1"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        MotionAdapter(8, **options)


def test_useful_parameters_at_width_768():
    assert sum(p.numel() for p in MotionAdapter(768).parameters()) == 2_067_841 - (384 * 384 * 9 + 384)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    adapter = shaken(MotionAdapter(16))
    x = torch.randn(2, 1 + 4 * 9, 16)
    full = adapter(x, 4)
    half = adapter.to(dtype)(x.to(dtype), 4)
    assert half.dtype == dtype
    assert torch.allclose(half.float(), full, rtol=0.1, atol=0.2)


def test_autocast_keeps_gradients():
    adapter = shaken(MotionAdapter(16))
    x = torch.randn(2, 1 + 4 * 9, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        adapter(x, 4).sum().backward()
    assert x.grad.isfinite().all()
    assert adapter.time.weight.grad.any()


def tiny(kind):
    torch.manual_seed(0)
    if kind == "timm":
        timm = pytest.importorskip("timm")
        return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0).eval()
    if kind == "timm registers":
        timm = pytest.importorskip("timm")
        return timm.create_model(
            "vit_small_patch14_reg4_dinov2", img_size=32, patch_size=16, depth=2, num_classes=0
        ).eval()
    if kind == "open_clip":
        open_clip = pytest.importorskip("open_clip")
        return open_clip.model.VisionTransformer(32, 16, 32, 2, 2, 4.0, output_dim=24).eval()
    transformers = pytest.importorskip("transformers")
    model, config = {
        "CLIP": ("CLIPVisionModel", "CLIPVisionConfig"),
        "CLIP projected": ("CLIPVisionModelWithProjection", "CLIPVisionConfig"),
        "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig"),
        "ViT": ("ViTModel", "ViTConfig"),
        "DINOv2": ("Dinov2Model", "Dinov2Config"),
        "DeiT": ("DeiTModel", "DeiTConfig"),
    }[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**SMALL)).eval()


KINDS = ["timm", "timm registers", "open_clip", "CLIP", "CLIP projected", "SigLIP", "ViT", "DINOv2", "DeiT"]


def features(model, pixels):
    from egovideo.tower import _pooled

    with torch.no_grad():
        return _pooled(model(pixels))


@pytest.mark.parametrize("kind", KINDS)
def test_inject_and_eject(kind):
    model = tiny(kind)
    names = set(model.state_dict())
    images, clips = torch.randn(2, 3, 32, 32), torch.randn(2, 4, 3, 32, 32)
    plain = features(model, images)
    assert inject(model, num_frames=4) is model
    assert torch.equal(features(model, images), plain)  # an image is a clip of one frame, and fresh adapters do nothing
    assert features(model, clips).shape == plain.shape
    added = set(model.state_dict()) - names
    assert names <= set(model.state_dict())
    assert added == set(adapter_parameters(model))
    assert torch.equal(features(copy.deepcopy(model), clips), features(model, clips))
    with pytest.raises(ValueError, match="already"):
        inject(model)
    eject(model)
    assert torch.equal(features(model, images), plain)
    assert set(model.state_dict()) == names
    with pytest.raises(ValueError, match="no motion adapters"):
        eject(model)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_frames_counts_once_adapters_are_trained(kind):
    model = inject(tiny(kind), num_frames=4)
    clips = torch.randn(1, 4, 3, 32, 32)
    forwards, backwards = features(model, clips), features(model, clips.flip(1))
    assert torch.allclose(forwards, backwards, atol=1e-5)
    for block in model.modules():
        if hasattr(block, "motion_adapter"):
            shaken(block.motion_adapter)
    forwards, backwards = features(model, clips), features(model, clips.flip(1))
    assert (forwards - backwards).norm() > 1e-2 * forwards.norm()


def test_frame_attention_of_identity_adapters_is_the_image_model_on_each_frame():
    model = tiny("CLIP")
    clips = torch.randn(2, 3, 3, 32, 32)
    each = features(model, clips.flatten(0, 1))
    tower = VideoTower(model, num_frames=3, attention="frame")
    with torch.no_grad():
        assert torch.allclose(tower(clips), each.reshape(2, 3, -1).mean(1), atol=1e-6)


def test_layers_and_shapes_that_do_not_fit():
    model = inject(tiny("CLIP"), layers=[1])
    assert [hasattr(layer, "motion_adapter") for layer in model.encoder.layers] == [False, True]
    with pytest.raises(ValueError, match="layers must be <= 1, got 5"):
        inject(tiny("CLIP"), layers=[5])
    with pytest.raises(ValueError, match=r"images \(n, 3, h, w\) or clips \(n, frames, 3, h, w\), got \(3, 32, 32\)"):
        model(torch.randn(3, 32, 32))
    with pytest.raises(TypeError, match="cannot put motion adapters into Linear"):
        inject(nn.Linear(2, 2))


def test_save_and_load(tmp_path):
    model, other = inject(tiny("CLIP"), num_frames=4), inject(tiny("CLIP"), num_frames=4)
    for layer in model.encoder.layers:
        shaken(layer.motion_adapter)
    save_adapter(model, tmp_path / "adapter.safetensors")
    clips = torch.randn(1, 4, 3, 32, 32)
    assert not torch.allclose(features(model, clips), features(other, clips))
    load_adapter(other, tmp_path / "adapter.safetensors")
    assert torch.equal(features(model, clips), features(other, clips))
    with pytest.raises(ValueError, match=r"does not fit the model: encoder\.layers\.0\.motion_adapter\.down\.bias"):
        load_adapter(inject(tiny("CLIP"), num_frames=4, ratio=0.25), tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match="no motion adapters to save"):
        save_adapter(tiny("CLIP"), tmp_path / "none.safetensors")


@pytest.mark.parametrize("kind", ["CLIP", "timm"])
def test_gradient_checkpointing_gives_the_same_gradients(kind):
    gradients = []
    for own in (False, True):
        model = inject(tiny(kind), num_frames=3).train()
        for block in model.modules():
            if hasattr(block, "motion_adapter"):
                shaken(block.motion_adapter)
        if own and kind == "CLIP":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif own:
            model.set_grad_checkpointing()
        torch.manual_seed(1)
        clips = torch.randn(2, 3, 3, 32, 32)
        output = model(clips)
        (output if kind == "timm" else output.pooler_output).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name


@pytest.mark.slow
def test_compiled():
    model = inject(tiny("CLIP"), num_frames=3)
    for layer in model.encoder.layers:
        shaken(layer.motion_adapter)
    clips = torch.randn(2, 3, 3, 32, 32)
    assert torch.allclose(features(torch.compile(model), clips), features(model, clips), atol=1e-4)
