import subprocess
import sys

import pytest

import topograph_loss


def test_the_face_is_what_it_lists():
    pytest.importorskip("monai")
    for name in topograph_loss.__all__:
        assert getattr(topograph_loss, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        topograph_loss.nothing  # noqa: B018


def test_importing_and_the_first_loss_pull_in_neither_an_extra_nor_the_compiler():
    code = """
import sys, torch
before = set(sys.modules)
from topograph_loss import TopographLoss
x = torch.rand(1, 1, 8, 8, requires_grad=True)
TopographLoss()(x, torch.ones(1, 1, 8, 8)).backward()
heavy = {"monai", "gudhi", "matplotlib", "scipy", "skimage", "PIL", "nibabel", "typer", "torch._dynamo"}
print((heavy & set(sys.modules)) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
