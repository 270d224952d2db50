import subprocess
import sys

import pytest

import llm_unlearn


def test_the_losses_come_without_transformers():
    heavy = "[m for m in ('transformers', 'peft', 'datasets', 'accelerate', 'scipy', 'pandas', 'matplotlib', 'typer') if m in sys.modules]"
    code = f"import sys, llm_unlearn, llm_unlearn.losses; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in llm_unlearn.__all__:
        assert getattr(llm_unlearn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = llm_unlearn.nonsense
