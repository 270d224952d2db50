"""Unlearning for language models: losses, a trainer and metrics (Yuan et al., ICLR 2025)."""

import importlib
from typing import TYPE_CHECKING, Any

from .objectives import Method, parse_method, register_forget_loss, register_regularizer

if TYPE_CHECKING:
    from .config import UnlearnConfig
    from .continual import Task, run_tasks
    from .data import RefusalPool, UnlearnCollator, build_example
    from .evaluation import QASet, UnlearnReport, evaluate_unlearning
    from .probe import quantization_probe, relearn_probe
    from .tofu import load_tofu
    from .trainer import UnlearningDiverged, UnlearnTrainer

# Whoever wants the losses alone does not wait for transformers.
_LAZY = {
    "UnlearnConfig": "config",
    "Task": "continual",
    "run_tasks": "continual",
    "RefusalPool": "data",
    "UnlearnCollator": "data",
    "build_example": "data",
    "QASet": "evaluation",
    "UnlearnReport": "evaluation",
    "evaluate_unlearning": "evaluation",
    "quantization_probe": "probe",
    "relearn_probe": "probe",
    "load_tofu": "tofu",
    "UnlearnTrainer": "trainer",
    "UnlearningDiverged": "trainer",
}

__all__ = [
    "UnlearnConfig",
    "UnlearnTrainer",
    "UnlearningDiverged",
    "Method",
    "parse_method",
    "register_forget_loss",
    "register_regularizer",
    "RefusalPool",
    "UnlearnCollator",
    "build_example",
    "load_tofu",
    "QASet",
    "UnlearnReport",
    "evaluate_unlearning",
    "Task",
    "run_tasks",
    "relearn_probe",
    "quantization_probe",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
