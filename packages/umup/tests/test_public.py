"""The public face."""

import subprocess
import sys

import pytest

import umup


def test_every_public_name_is_there_and_documented():
    pytest.importorskip("transformers")
    for name in umup.__all__:
        assert getattr(umup, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = umup.nope


def test_the_base_import_is_light_and_missing_extras_are_named():
    script = """
import sys
for extra in ("transformers", "matplotlib", "typer"):
    sys.modules[extra] = None
import umup
assert not {"matplotlib.figure", "pandas", "scipy", "torch._dynamo"} & set(sys.modules)
for ask in (lambda: umup.UmupConfig, lambda: umup.convert, lambda: __import__("umup.cli")):
    try:
        ask()
    except ImportError as error:
        print(error)
from umup.plots import plot_scales
try:
    plot_scales({})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for extra, count in (("umup[hf]", 2), ("umup[cli]", 1), ("umup[plot]", 1)):
        assert done.stdout.count(f"pip install '{extra}'") == count, done.stdout
