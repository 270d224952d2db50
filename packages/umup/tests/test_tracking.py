import json
import math

import pytest
import torch
from torch import nn

import umup.nn as unn
from umup.optim import AdamW
from umup.tracking import coord_check, scale_report


def decoder(width=64):
    return unn.TransformerDecoder(32, width, 2, 4, intermediate_size=2 * width, scale_seq_len=16)


def test_every_scale_of_a_fresh_model_is_near_one():
    torch.manual_seed(0)
    model = decoder()
    ids = torch.randint(32, (8, 16))
    report = scale_report(model, lambda m: m.loss(ids))
    assert set(report.weight) == {n for n, _ in model.named_parameters()}
    assert set(report.weight_grad) == set(report.weight)
    assert "layers.0.self_attn.q_proj" in report.forward
    assert report.backward["layers.1.mlp.down_proj"] == pytest.approx(0.7, abs=0.3)
    # By design: readout values are 1/sqrt(width), and almost uniform attention hardly depends on queries and keys.
    outside = {name.removesuffix(".weight").rpartition(".")[2] for name in report.outside(0.2, 5.0)}
    assert outside <= {"lm_head", "q_proj", "k_proj"}
    assert report.forward["lm_head"] == pytest.approx(64**-0.5, rel=0.2)
    assert json.loads(report.to_json())["weight"].keys() == report.weight.keys()
    assert "lm_head" in str(report)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_umup_passes_the_coordinate_check_and_a_plain_net_does_not():
    torch.manual_seed(0)
    batches = [torch.randint(32, (4, 16)) for _ in range(3)]

    def chosen(name):
        return name in ("lm_head", "norm") or name.endswith("down_proj")

    ours = coord_check(
        decoder,
        lambda m: AdamW(m, lr=0.5),
        lambda m, b: m.loss(b),
        widths=[32, 64, 128],
        batches=batches,
        seeds=(0, 1),
        modules=chosen,
    )
    assert {r["step"] for r in ours.rows} == {1, 2, 3}
    assert ours.failing(0.4) == {}

    def plain(width):
        return nn.Sequential(nn.Embedding(32, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 32))

    theirs = coord_check(
        plain,
        lambda m: torch.optim.Adam(m.parameters(), lr=0.03),
        lambda m, b: nn.functional.cross_entropy(m(b).flatten(0, 1), b.flatten()),
        widths=[32, 64, 128, 256],
        batches=batches,
    )
    assert theirs.slopes(1)["3"] > 0.5  # logits move further the wider the net
    assert "3" in theirs.failing(0.4)


def test_the_embedding_rule_shows_as_a_slope_of_minus_one_half():
    check = coord_check(
        decoder,
        lambda m: AdamW(m, lr=0.5),
        lambda m, b: m.loss(b),
        widths=[32, 64, 128],
        batches=[torch.randint(32, (4, 16))],
        modules=lambda name: name in ("embed_tokens", "norm"),
    )
    assert check.slopes()["embed_tokens"] == pytest.approx(-0.5, abs=0.05)
    assert "embed_tokens" in check.failing(0.4)
    assert check.failing(0.4, growth_only=True) == {}


def test_a_diverged_module_fails_the_check():
    check = coord_check(
        decoder,
        lambda m: torch.optim.SGD(m.parameters(), lr=math.inf),
        lambda m, b: m.loss(b),
        widths=[8, 16],
        batches=[torch.randint(32, (1, 4))],
        modules=lambda n: n == "lm_head",
    )
    assert check.failing() == {"lm_head": math.inf}


def test_too_little_to_check_is_refused():
    with pytest.raises(ValueError, match="two widths"):
        coord_check(decoder, AdamW, lambda m, b: m.loss(b), widths=[8, 8], batches=[torch.zeros(1, 4)])
    with pytest.raises(ValueError, match="batch"):
        coord_check(decoder, AdamW, lambda m, b: m.loss(b), widths=[8, 16], batches=[])
