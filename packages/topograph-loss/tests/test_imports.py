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
