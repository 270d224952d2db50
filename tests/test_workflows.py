"""What the workflows decide by script: which folders a change concerns, and what a tag releases."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["packages/a-loss", "packages/a-loss-too", "shared", "tools"]


def run(script, *arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / ".github" / script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path):
    identity = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments):
        command = ["git", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env={**os.environ, **identity})

    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(
            f'[project]\nname = "{folder.rpartition("/")[2]}"\nversion = "0.1.0"\n'
        )
    git("init", "--quiet")

    def commit(*paths):
        for path in paths:
            (tmp_path / path).write_text("changed")
        git("add", ".")
        git("commit", "--quiet", "--message", "change")
        return tmp_path

    commit("README.md")
    return commit


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        (["packages/a-loss/x.py"], ["packages/a-loss"]),
        (["packages/a-loss-too/x.py", "tools/x.py"], ["packages/a-loss-too", "tools"]),
        (["packages/a-loss/größe.py"], ["packages/a-loss"]),
        (["NOTES.md"], []),
        (["shared/x.py"], FOLDERS),
        (["uv.lock"], FOLDERS),
    ],
)
def test_a_change_concerns_its_own_folder_and_one_to_the_common_package_all(repository, changed, concerned):
    done = run("changed_folders.py", "HEAD~1", cwd=repository(*changed))
    assert json.loads(done.stdout.removeprefix("folders=")) == concerned


def test_a_base_that_is_gone_means_everything(repository):
    done = run("changed_folders.py", "0" * 40, cwd=repository("tools/x.py"))
    assert json.loads(done.stdout.removeprefix("folders=")) == FOLDERS


def test_a_tag_names_the_distribution_and_its_version(repository):
    done = run("read_tag.py", "a-loss-too-v0.1.0", cwd=repository("x"))
    assert done.stdout == "dist=a-loss-too\nversion=0.1.0\n"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("a-loss-v0.2.0", "the tag says a-loss 0.2.0, but its metadata says 0.1.0"),
        ("b-loss-v0.1.0", "no distribution 'b-loss'"),
        ("v0.1.0", "is not a release tag"),
        ("a-loss-0.1.0", "is not a release tag"),
        ("a-loss-v0.1.0\nx", "is not a release tag"),
    ],
)
def test_a_tag_that_does_not_fit_stops_the_release(repository, tag, message):
    done = run("read_tag.py", tag, cwd=repository("x"))
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""


def test_local_and_hosted_checks_are_the_same_commands():
    local = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    hosted = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    commands = set(re.findall(r"run: (uv run (?:ruff|mypy|chapbook (?:list|try)|pytest).*)$", hosted, re.MULTILINE))
    shared = {command for command in commands if "$" not in command and "&&" not in command}
    assert len(shared) == 6
    assert {command for command in shared if command not in local} == set()
