"""Learning rates. tests/data/param_groups.json: computed by unit-scaling 0.3.5."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import umup.nn as unn
from umup.compat import from_unit_scaling
from umup.optim import SGD, Adam, AdamW, check_optimizer, clip_grad_norm_, get_param_groups, lr_scale
from umup.roles import Role, UmupParameterError, parameter_roles, set_roles

CASES = json.loads((Path(__file__).parent / "data" / "param_groups.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Adam's weight decay")
def test_rates_and_decays_equal_the_reference_librarys(case):
    model = unn.TransformerDecoder(case["vocab"], case["hidden"], case["layers"], case["heads"])
    model.lm_head.constraint = case.get("readout_constraint")
    groups = get_param_groups(
        model,
        case["lr"],
        case["weight_decay"],
        optimizer=case["optimizer"].lower(),
        weight_decay_mode="independent" if case["independent"] else "coupled",
    )
    ours = {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["umup_names"]}
    checked = set()
    for group in case["groups"]:
        for name in from_unit_scaling({group["name"]: torch.zeros(group["shape"])}):
            assert ours[name] == pytest.approx((group["lr"], group["weight_decay"]), rel=1e-9)
            checked.add(name)
    assert checked == set(ours)
    assert len(groups) <= 4


def small():
    torch.manual_seed(0)
    return unn.TransformerDecoder(13, 16, 2, 2)


def test_the_abc_table_by_hand():
    assert lr_scale(Role("input", 100, 64)) == 1 / 8
    assert lr_scale(Role("hidden", 64, 16), 4) == 1 / 16
    assert lr_scale(Role("output", 64, 16)) == 1
    assert lr_scale(Role("bias", 1, 64), 4) == 0.5
    assert lr_scale(Role("hidden", 64, 16), optimizer="sgd", readout_constraint="to_output_scale") == 8
    assert lr_scale(Role("norm", 1, 64), optimizer="sgd", readout_constraint="to_output_scale") == 64
    with pytest.raises(ValueError, match="gmean"):
        lr_scale(Role("hidden", 4, 4), optimizer="sgd", readout_constraint="gmean")


def test_depth_by_branch_counts_two_per_layer_and_follows_changes():
    model = small()
    layer = {n: g["lr"] for g in get_param_groups(model, 1.0) for n in g["umup_names"]}
    branch = {n: g["lr"] for g in get_param_groups(model, 1.0, depth_unit="branch") for n in g["umup_names"]}
    name = "layers.0.mlp.up_proj.weight"
    assert branch[name] == pytest.approx(layer[name] / math.sqrt(2))
    assert branch["lm_head.weight"] == layer["lm_head.weight"]
    model.layers.append(unn.TransformerLayer(16, 2, attn_tau=0.1, mlp_tau=0.1))
    model.layers.append(unn.TransformerLayer(16, 2, attn_tau=0.1, mlp_tau=0.1))
    deeper = {n: g["lr"] for g in get_param_groups(model, 1.0) for n in g["umup_names"]}
    assert deeper[name] == pytest.approx(layer[name] / math.sqrt(2))
    fixed = unn.DepthModuleList([unn.Linear(4, 4)], depth=16)
    assert get_param_groups(fixed, 1.0)[0]["lr"] == pytest.approx(0.5 / 4)


def test_independent_decay_does_not_depend_on_the_learning_rate():
    model = small()
    decays = []
    for lr in (0.5, 4.0):
        groups = get_param_groups(model, lr, 2**-10)
        decays.append([g["lr"] * g["weight_decay"] for g in groups])
        optimizer = torch.optim.AdamW(groups)
        before = model.lm_head.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(model.lm_head.weight.detach(), before * (1 - 2**-10))
    assert decays[0] == pytest.approx([2**-10] * len(decays[0]))
    assert decays[1] == pytest.approx(decays[0])


def test_decay_can_be_kept_off_some_roles():
    groups = get_param_groups(small(), 1.0, 0.1, decay_kinds=["hidden"])
    assert {g["weight_decay"] > 0 for g in groups if "lm_head.weight" in g["umup_names"]} == {False}


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}, {}])
def test_every_adamw_implementation_takes_the_groups(kwargs):
    model = small()
    optimizer = torch.optim.AdamW(get_param_groups(model, 1.0, 2**-13), **kwargs)
    model.loss(torch.randint(13, (2, 6))).backward()
    optimizer.step()
    state = optimizer.state_dict()
    again = torch.optim.AdamW(get_param_groups(model, 1.0, 2**-13), **kwargs)
    again.load_state_dict(state)
    assert check_optimizer(again) == pytest.approx(1.0)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adafactor, torch.optim.RAdam])
def test_other_optimizers_take_the_groups(make):
    model = small()
    optimizer = make(get_param_groups(model, 0.1))
    model.loss(torch.randint(13, (2, 6))).backward()
    optimizer.step()


@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_ready_made_optimizers_lower_the_loss(make):
    model = small()
    optimizer = make(model, lr=0.1 if make is SGD else 0.5)
    ids = torch.randint(13, (4, 8))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_schedulers_keep_the_ratios_and_a_single_number_does_not():
    optimizer = AdamW(small(), lr=2.0)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ]
    assert check_optimizer(optimizer) == pytest.approx(1.0)
    for scheduler in schedulers:
        optimizer.step()
        scheduler.step()
        check_optimizer(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    with pytest.raises(ValueError, match="single number"):
        check_optimizer(optimizer)
    with pytest.raises(ValueError, match="umup_scale"):
        check_optimizer(torch.optim.SGD(small().parameters(), lr=1.0))


def test_clipping_works_on_the_root_mean_square():
    model = small()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(3.0)
    torch.testing.assert_close(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert clip_grad_norm_(model.parameters(), 10.0).item() == pytest.approx(1.0)
    assert clip_grad_norm_([], 1.0).item() == 0
    with pytest.raises(ValueError, match="max_rms"):
        clip_grad_norm_(model, 0.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": 0.0}, "lr must be"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay must be"),
        ({"lr": 1.0, "weight_decay_mode": "both"}, "weight_decay_mode"),
        ({"lr": 1.0, "optimizer": "lion"}, "optimizer must be"),
        ({"lr": 1.0, "depth_unit": "head"}, "depth_unit"),
        ({"lr": 1.0, "foreign": "skip"}, "foreign"),
        ({"lr": 1.0, "decay_kinds": ["hiden"]}, "hiden"),
    ],
)
def test_bad_numbers_are_refused_before_any_optimizer_exists(kwargs, message):
    with pytest.raises(ValueError, match=message):
        get_param_groups(small(), **kwargs)


@pytest.mark.parametrize("value", ["1", None, True, torch.tensor(1.0)])
def test_what_is_no_number_is_named(value):
    unchecked = getattr(get_param_groups, "__wrapped__", get_param_groups)  # without the type checks of the tests
    with pytest.raises(TypeError, match="lr must be a number, got"):
        unchecked(small(), value)
    with pytest.raises(TypeError, match="weight_decay must be a number, got"):
        unchecked(small(), 1.0, value)


def test_adam_with_independent_decay_warns():
    with pytest.warns(UserWarning, match="L2 term"):
        get_param_groups(small(), 1.0, 0.1, optimizer="adam")


def test_parameters_without_a_role_are_named_with_their_owner():
    model = nn.Sequential(unn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(UmupParameterError, match=r"1\.weight of torch\.nn.*Linear, shape \(2, 4\).*umup\.nn"):
        get_param_groups(model, 1.0)
    groups = get_param_groups(model, 1.0, foreign="base")
    assert {n: g["lr"] for g in groups for n in g["umup_names"]}["1.weight"] == 1.0
    model[1].requires_grad_(False)
    get_param_groups(model, 1.0)
    with pytest.raises(UmupParameterError, match="no trainable"):
        get_param_groups(nn.Sequential(), 1.0)


def test_adapters_parametrizations_and_quantised_weights_have_their_own_advice():
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = nn.Linear(4, 2, bias=False)

    with pytest.raises(UmupParameterError, match="adapter"):
        get_param_groups(Adapter(), 1.0)
    layer = unn.Linear(4, 4)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(UmupParameterError, match="parametrization"):
        get_param_groups(layer, 1.0)
    layer = unn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UmupParameterError, match="quantising"):
        get_param_groups(layer, 1.0)


def test_tied_weights_are_refused_when_their_rules_differ():
    model = small()
    model.lm_head.weight = model.embed_tokens.weight
    with pytest.raises(UmupParameterError, match=r"embed_tokens.weight \(input\) and lm_head.weight \(output\)"):
        get_param_groups(model, 1.0)
    shared = nn.Sequential(unn.Linear(4, 4), unn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    assert len(get_param_groups(shared, 1.0)[0]["params"]) == 1


def test_nested_depth_stacks_are_refused():
    nested = unn.DepthSequential(unn.DepthSequential(unn.Linear(4, 4)))
    with pytest.raises(UmupParameterError, match="inside"):
        get_param_groups(nested, 1.0)


def test_roles_can_be_given_to_other_modules():
    conv = set_roles(nn.Conv2d(3, 8, 3, bias=False), weight=Role("hidden", 27, 8))
    (group,) = get_param_groups(conv, 1.0)
    assert group["lr"] == pytest.approx(27**-0.5)
    with pytest.raises(ValueError, match="wieght"):
        set_roles(nn.Linear(2, 2), wieght=Role("hidden", 2, 2))
    with pytest.raises(ValueError, match="role must be"):
        Role("middle")
    with pytest.raises(ValueError, match="fans"):
        Role("hidden", 0, 1)


def test_fans_are_the_modules_not_the_parameters_shape():
    """A process that holds a slice of a weight (tensor parallel) gets the whole weight's learning rate."""
    layer = unn.Linear(16, 8)
    layer.weight = nn.Parameter(torch.randn(8, 4))
    assert parameter_roles(layer)[0][0].role.fan_in == 16
