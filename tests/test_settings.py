"""The settings in the root conftest are in force."""

import os
import warnings

import pytest


def test_no_hub_and_no_window():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["MPLBACKEND"] == "Agg"


def warn_from(module: str) -> None:
    warnings.warn_explicit("careless", UserWarning, filename="somewhere.py", lineno=1, module=module)


@pytest.mark.parametrize("module", ["chapbook", "chapbook.cli", "chapbook_shared.jobs", "topograph_loss"])
def test_a_warning_from_our_own_module_is_an_error(module):
    with pytest.raises(UserWarning, match="careless"):
        warn_from(module)


@pytest.mark.parametrize("module", ["chapbooks_of_others", "torch.nn"])
def test_a_warning_from_another_library_is_not(module):
    with warnings.catch_warnings(record=True) as seen:
        warn_from(module)
    assert len(seen) == 1
