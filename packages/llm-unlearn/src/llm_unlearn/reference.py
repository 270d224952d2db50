"""The reference model theta_0: a disabled or second adapter, a frozen copy, a model given, or scores taken once before training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

REFERENCE_ADAPTER = "reference"


def has_adapter(model: nn.Module) -> bool:
    """Whether the model is a PEFT model."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def is_fresh_adapter(model: nn.Module) -> bool:
    """Whether the adapter still leaves the base unchanged: some matrix of every LoRA pair is zero."""
    b_matrices = [p for name, p in model.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name]
    others = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    return bool(b_matrices) and not others and all(not bool(p.detach().any()) for p in b_matrices)


def freeze_copy(model: nn.Module) -> nn.Module:
    """A frozen copy in evaluation mode; logs how much memory it takes."""
    duplicate = copy.deepcopy(model).eval().requires_grad_(False)
    size = sum(p.numel() * p.element_size() for p in duplicate.parameters())
    logger.warning(
        "keeping a frozen copy of the model as the reference: %.1f MiB (precompute_ref=True or an adapter avoids it where the method allows)",
        size / 2**20,
    )
    return duplicate


def add_reference_adapter(model: Any) -> None:
    """Copy a trained adapter to a second, frozen one, which then stands for the model as it is now."""
    active = model.active_adapter
    if isinstance(active, list):
        if len(active) != 1:
            raise ValueError(f"one adapter must be active to be unlearned and kept as the reference, got {active!r}")
        (active,) = active
    model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[active]))
    values = {name: p.detach() for name, p in model.named_parameters() if f".{active}." in name}
    for name, parameter in model.named_parameters():
        if f".{REFERENCE_ADAPTER}." in name:
            parameter.data.copy_(values[name.replace(f".{REFERENCE_ADAPTER}.", f".{active}.")])
    model.set_adapter(active)


def prepare_copy(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """The frozen copy on the device, sharded as accelerate shards the trained model."""
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        raise ValueError(
            "a second full model cannot be the reference under DeepSpeed: pass precompute_ref=True (NPO, DPO), train an adapter "
            "(peft_config), or choose a method without a reference (ME, IDK, GA with GD or AP)"
        )
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared


@contextmanager
def as_reference(model: nn.Module, *, adapter: str | None) -> Iterator[None]:
    """Within: a PEFT model answers as its base (adapter None) or as another of its adapters, in evaluation mode, without gradients."""
    peft: Any = model
    was_training = model.training
    model.eval()
    try:
        if adapter is None:
            with peft.disable_adapter(), torch.no_grad():
                yield
        else:
            active = peft.active_adapter
            trainable = {name for name, p in model.named_parameters() if p.requires_grad}
            peft.set_adapter(adapter)
            try:
                with torch.no_grad():
                    yield
            finally:
                peft.set_adapter(active)
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name in trainable)
    finally:
        model.train(was_training)
