"""Language models behind one small protocol: hosted, served next door, in this process, or recorded.

Importing this package is light; a model's own libraries are imported when the model is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chapbook_shared.lm._base import BudgetExceeded, LanguageModelError, RequestFailed
from chapbook_shared.lm.protocol import (
    Capabilities,
    CapabilityError,
    Completion,
    Image,
    LanguageModel,
    Message,
    Sampling,
    Score,
    TokenLogprob,
    Usage,
    check_request,
)

if TYPE_CHECKING:
    from chapbook_shared.lm._text import TextCodec
    from chapbook_shared.lm.budgets import Budget
    from chapbook_shared.lm.cache import ResponseCache
    from chapbook_shared.lm.local_model import LocalModel
    from chapbook_shared.lm.openai_model import OpenAIModel
    from chapbook_shared.lm.openvino_model import OpenVINOModel
    from chapbook_shared.lm.pool import ModelPool
    from chapbook_shared.lm.scripted import ScriptedModel
    from chapbook_shared.lm.serve import Faults, Server

_LAZY = {
    "Budget": "budgets",
    "Faults": "serve",
    "LocalModel": "local_model",
    "ModelPool": "pool",
    "OpenAIModel": "openai_model",
    "OpenVINOModel": "openvino_model",
    "ResponseCache": "cache",
    "ScriptedModel": "scripted",
    "Server": "serve",
    "TextCodec": "_text",
}

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Capabilities",
    "CapabilityError",
    "Completion",
    "Faults",
    "Image",
    "LanguageModel",
    "LanguageModelError",
    "LocalModel",
    "Message",
    "ModelPool",
    "OpenAIModel",
    "OpenVINOModel",
    "RequestFailed",
    "ResponseCache",
    "Sampling",
    "Score",
    "ScriptedModel",
    "Server",
    "TextCodec",
    "TokenLogprob",
    "Usage",
    "check_request",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
