"""`chapbook new`: what it writes passes, where it cannot write it says so and writes nothing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from chapbook.checks.run import READING
from chapbook.scaffold import create, with_member
from chapbook.workspace import UsageError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", READING)
def test_a_new_package_passes_every_check_that_reads(workspace, check):
    assert list(READING[check](workspace.find("demo-pkg"), workspace)) == []


def test_the_command_says_what_it_wrote(chapbook, workspace):
    done = chapbook("new", "my-second", cwd=workspace.root)
    assert done.code == 0, done.err
    assert "wrote packages/my-second/src/my_second/__init__.py" in done.err
    assert (workspace.root / "packages" / "my-second" / "LICENSE").read_text() == "the licence\n"
    assert chapbook("check", "my-second", "--quick", cwd=workspace.root).code == 0


@pytest.mark.parametrize("dist", ["a", "zz-top", "a-very-long-name-of-a-package-with-a-dozen-words"])
def test_a_new_package_is_linted_and_formatted_whatever_its_name(workspace, dist):
    create(workspace, dist)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", f"packages/{dist}"]
        done = subprocess.run(ruff, cwd=workspace.root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_root_lists_the_package_in_order(workspace):
    create(workspace, "a-first")
    root = tomllib.loads((workspace.root / "pyproject.toml").read_text())
    assert root["project"]["dependencies"] == ["a-first[demo]", "chapbook-shared", "demo-pkg[demo]"]
    assert list(root["tool"]["uv"]["sources"]) == ["a-first", "chapbook-shared", "demo-pkg"]


def test_sources_at_the_end_of_the_file_and_comments_are_kept():
    text = '[project]\ndependencies = [\n    "zoo",\n]\n\n[tool.uv.sources]\nzoo = { workspace = true }\n\n# A word.\n[tool.x]\n'
    fresh = with_member(text, "my-method")
    assert fresh == text.replace('    "zoo"', '    "my-method[demo]",\n    "zoo"').replace(
        "zoo = {", "my-method = { workspace = true }\nzoo = {"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Topo", "lower-case words"),
        ("my_method", "lower-case words"),
        ("../evil", "lower-case words"),
        ("demo-pkg", "there is a demo-pkg already"),
        ("json", "standard library"),
        ("class", "a word of the Python language"),
        ("numpy", "another installed library"),
    ],
)
def test_a_name_that_cannot_be_is_refused(chapbook, workspace, name, message):
    before = (workspace.root / "pyproject.toml").read_text()
    done = chapbook("new", name, cwd=workspace.root)
    assert done.code == 2
    assert message in done.err
    assert (workspace.root / "pyproject.toml").read_text() == before
    assert sorted(path.name for path in (workspace.root / "packages").iterdir()) == ["demo-pkg"]


def test_a_root_that_looks_unexpected_is_refused_before_anything_is_written(workspace):
    (workspace.root / "pyproject.toml").write_text("[tool.uv.workspace]\nmembers = []\n")
    with pytest.raises(UsageError, match="has no line that matches"):
        create(workspace, "my-second")
    assert not (workspace.root / "packages" / "my-second").exists()
