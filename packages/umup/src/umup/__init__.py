"""u-muP: unit-scaled maximal update parametrization (Blake et al., ICLR 2025)."""

import importlib
from typing import Any

from umup import functional, nn
from umup.nn import effective_tokens
from umup.optim import SGD, Adam, AdamW, check_optimizer, clip_grad_norm_, get_param_groups, lr_scale
from umup.precision import Fp8Report, cast_fp8, fp8, fp8_available, simulate_fp8
from umup.residual import ResidualPairError, check_residual_pairs, transformer_taus
from umup.roles import Role, RoledParameter, UmupParameterError, parameter_roles, set_roles
from umup.scaling import apply_constraint, scale_bwd, scale_fwd
from umup.tracking import CoordCheck, ScaleReport, coord_check, scale_report, track_scales
from umup.tuning import SweepError, SweepResult, log2grid, sweep, transfer_error

__all__ = [
    # Building blocks
    "functional",
    "nn",
    "scale_fwd",
    "scale_bwd",
    "apply_constraint",
    "transformer_taus",
    "check_residual_pairs",
    "ResidualPairError",
    # Parameters and optimisers
    "Role",
    "RoledParameter",
    "UmupParameterError",
    "set_roles",
    "parameter_roles",
    "lr_scale",
    "get_param_groups",
    "Adam",
    "AdamW",
    "SGD",
    "check_optimizer",
    "clip_grad_norm_",
    "effective_tokens",
    # Low precision
    "fp8",
    "simulate_fp8",
    "cast_fp8",
    "fp8_available",
    "Fp8Report",
    # Looking and tuning
    "scale_report",
    "track_scales",
    "ScaleReport",
    "coord_check",
    "CoordCheck",
    "sweep",
    "SweepResult",
    "SweepError",
    "log2grid",
    "transfer_error",
    # transformers (extra: hf), loaded when first asked for
    "UmupConfig",
    "UmupModel",
    "UmupForCausalLM",
    "UmupTrainer",
    "convert",
]

_LAZY = {
    "UmupConfig": "hf",
    "UmupModel": "hf",
    "UmupForCausalLM": "hf",
    "UmupTrainer": "hf",
    "convert": "conversion",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"umup.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'umup' has no attribute {name!r}")
