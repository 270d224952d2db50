"""Alignment data out of an aligned model's own chat template (Magpie, Xu et al., ICLR 2025)."""

from .domains import DOMAINS, FOLLOW_UP, LANGUAGES
from .errors import BackendError, MagpieError, SystemPromptError, TemplateError
from .generation import Magpie
from .rows import Row, Run
from .settings import AIR, PRO, InstructionSettings, ResponseSettings
from .stopping import OFFICIAL_STOP_WORDS, sanitize
from .template import ChatTemplate, PromptTemplate, derive_template

__all__ = [
    "Magpie",
    "InstructionSettings",
    "ResponseSettings",
    "AIR",
    "PRO",
    "Run",
    "Row",
    "ChatTemplate",
    "PromptTemplate",
    "derive_template",
    "sanitize",
    "OFFICIAL_STOP_WORDS",
    "DOMAINS",
    "FOLLOW_UP",
    "LANGUAGES",
    "BackendError",
    "MagpieError",
    "SystemPromptError",
    "TemplateError",
]
