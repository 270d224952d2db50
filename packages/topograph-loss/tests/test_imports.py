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


def test_importing_pulls_in_no_extra():
    heavy = "{'monai', 'gudhi', 'matplotlib', 'scipy', 'skimage', 'PIL', 'nibabel', 'typer'}"
    code = f"import sys, torch; before = set(sys.modules); import topograph_loss; print(({heavy} & set(sys.modules)) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_first_loss_does_not_import_the_compiler():
    code = (
        "import sys, torch; from topograph_loss import TopographLoss; x = torch.rand(1, 1, 8, 8, requires_grad=True);"
        "TopographLoss()(x, torch.ones(1, 1, 8, 8)).backward(); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
