"""Model Equality Testing (ICLR 2025): is this API serving the model it says?"""

from mmd_equality.kernels import AllSubstrings, Callable, Hamming, Kernel, KSpectrum, OneHot, Precomputed
from mmd_equality.samples import Samples
from mmd_equality.two_sample import Caution, PromptEffect, TestResult, two_sample_test

__all__ = [
    "AllSubstrings",
    "Callable",
    "Caution",
    "Hamming",
    "KSpectrum",
    "Kernel",
    "OneHot",
    "Precomputed",
    "PromptEffect",
    "Samples",
    "TestResult",
    "two_sample_test",
]
