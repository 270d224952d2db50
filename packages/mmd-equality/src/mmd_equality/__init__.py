"""Model Equality Testing (ICLR 2025): is this API serving the model it says?"""

from mmd_equality.decisions import (
    AuditReport,
    Comparison,
    Ledger,
    Look,
    SequentialAudit,
    adjust_pvalues,
    audit,
    vote_pvalue,
)
from mmd_equality.goodness import GoodnessResult, goodness_of_fit
from mmd_equality.kernels import AllSubstrings, Callable, Hamming, Kernel, KSpectrum, OneHot, Precomputed
from mmd_equality.planning import Plan, PlanRow, plan
from mmd_equality.samples import Samples
from mmd_equality.two_sample import Caution, PromptEffect, TestResult, two_sample_test

__all__ = [
    "AllSubstrings",
    "AuditReport",
    "Callable",
    "Caution",
    "Comparison",
    "GoodnessResult",
    "Hamming",
    "KSpectrum",
    "Kernel",
    "Ledger",
    "Look",
    "OneHot",
    "Plan",
    "PlanRow",
    "Precomputed",
    "PromptEffect",
    "Samples",
    "SequentialAudit",
    "TestResult",
    "adjust_pvalues",
    "audit",
    "goodness_of_fit",
    "plan",
    "two_sample_test",
    "vote_pvalue",
]
