"""Argument checks with one voice: an error names the argument, shows the value and says what would be right."""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Collection
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number > 0."""
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def check_nonnegative(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number >= 0."""
    if not (_is_number(value) and math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not (_is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")


def check_int(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None) -> None:
    """Raise TypeError unless `value` is an integer, ValueError unless it lies in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value!r}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be <= {maximum}, got {value!r}")


def check_choice(name: str, value: T, choices: Collection[T]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in tuple(choices):  # a mapping or set would ask for a hash, which a list has not
        options = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {options}, got {value!r}")


def import_extra(module: str, requirement: str) -> ModuleType:
    """Import `module`, which comes with an optional extra.

    Raises ImportError with the exact install line (`requirement` is what to install, such as `"topograph-loss[monai]"`) when the
    library is missing. A library that is there but broken raises its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        raise ImportError(f"{top} is needed here and is not installed: pip install '{requirement}'") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
