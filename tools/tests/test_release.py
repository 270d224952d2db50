"""`chapbook release`: what it changes, what it refuses."""

import datetime
import subprocess

import pytest

from chapbook import release
from chapbook.release import Bump
from chapbook.workspace import UsageError, Workspace

TODAY = datetime.date(2026, 3, 1)
LOCK = '[[package]]\nname = "demo-pkg"\nversion = "0.1.0"\nsource = { editable = "x" }\n\n[[package]]\nname = "numpy"\nversion = "0.1.0"\n'


def git(root, *arguments):
    command = ["git", "-C", str(root), "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def note_change(workspace, dist="demo-pkg", line="- Twice as fast."):
    file = workspace.find(dist).folder / "CHANGELOG.md"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("# Changelog\n", f"# Changelog\n\n## Unreleased\n{line}\n"), encoding="utf-8")


@pytest.fixture
def repository(workspace, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    (workspace.root / "uv.lock").write_text(LOCK, encoding="utf-8")
    note_change(workspace)
    git(workspace.root, "init", "--quiet")
    git(workspace.root, "add", ".")
    git(workspace.root, "commit", "--quiet", "-m", "start")
    return Workspace(workspace.root)


def test_a_release_is_version_changelog_lock_commit_and_tag(chapbook, repository):
    done = chapbook("release", "demo-pkg", "--bump", "minor", cwd=repository.root)
    assert done.code == 0, done.err
    assert done.out == "demo-pkg-v0.2.0\n"
    member = Workspace(repository.root).find("demo-pkg")
    assert member.version == "0.2.0"
    assert f"## 0.2.0 - {datetime.date.today().isoformat()}\n- Twice as fast." in member.changelog
    assert "Unreleased" not in member.changelog
    lock = (repository.root / "uv.lock").read_text(encoding="utf-8")
    assert 'name = "demo-pkg"\nversion = "0.2.0"' in lock
    assert 'name = "numpy"\nversion = "0.1.0"' in lock
    assert git(repository.root, "tag", "--list").split() == ["demo-pkg-v0.2.0"]
    assert git(repository.root, "status", "--porcelain") == ""
    changed = git(repository.root, "show", "--name-only", "--format=%s", "HEAD").split("\n")
    assert changed[0] == "Release demo-pkg 0.2.0"
    assert set(filter(None, changed[1:])) == {
        "packages/demo-pkg/CHANGELOG.md",
        "packages/demo-pkg/pyproject.toml",
        "uv.lock",
    }


def test_a_dry_run_changes_nothing(chapbook, repository):
    before = git(repository.root, "rev-parse", "HEAD")
    done = chapbook("release", "demo-pkg", "--bump", "major", "--dry-run", cwd=repository.root)
    assert done.code == 0
    assert "demo-pkg 0.1.0 -> 1.0.0" in done.err
    assert git(repository.root, "rev-parse", "HEAD") == before
    assert git(repository.root, "status", "--porcelain") == ""
    assert git(repository.root, "tag", "--list") == ""


@pytest.mark.parametrize(("bump", "version"), [(Bump.major, "2.0.0"), (Bump.minor, "1.3.0"), (Bump.patch, "1.2.4")])
def test_bumps(bump, version):
    assert release.bumped("1.2.3", bump) == version


def test_a_version_that_is_not_three_numbers_is_refused():
    with pytest.raises(UsageError, match="three numbers"):
        release.bumped("1.0rc1", Bump.patch)


def test_a_dirty_tree_is_refused(chapbook, repository):
    (repository.root / "notes.txt").write_text("x")
    done = chapbook("release", "demo-pkg", "--bump", "patch", cwd=repository.root)
    assert done.code == 2
    assert "uncommitted changes" in done.err
    assert "notes.txt" in done.err


def test_an_existing_tag_is_refused(repository):
    git(repository.root, "tag", "demo-pkg-v0.1.1")
    with pytest.raises(UsageError, match=r"demo-pkg-v0\.1\.1 exists already"):
        release.plan(repository, repository.find("demo-pkg"), Bump.patch, today=TODAY)


@pytest.mark.parametrize("section", ["", "## Unreleased\n", "## Unreleased\n\n"])
def test_a_release_that_says_nothing_is_refused(repository, section):
    file = repository.find("demo-pkg").folder / "CHANGELOG.md"
    file.write_text(f"# Changelog\n\n{section}\n## 0.1.0\n- First.\n", encoding="utf-8")
    git(repository.root, "commit", "--quiet", "-a", "-m", "nothing to say")
    with pytest.raises(UsageError, match="Unreleased"):
        release.plan(repository, repository.find("demo-pkg"), Bump.patch, today=TODAY)


def test_a_lock_that_is_behind_is_refused(repository):
    (repository.root / "uv.lock").write_text(LOCK.replace("0.1.0", "0.0.9"), encoding="utf-8")
    git(repository.root, "commit", "--quiet", "-a", "-m", "stale lock")
    with pytest.raises(UsageError, match="run uv lock"):
        release.plan(repository, repository.find("demo-pkg"), Bump.patch, today=TODAY)


def test_a_release_of_the_common_package_names_the_lower_bounds(repository):
    shared = repository.find("chapbook-shared")
    assert release.notes(repository, shared, "0.2.0") == [
        "demo-pkg asks for chapbook-shared>=0.1: raise that to >=0.2.0 if it uses what is new"
    ]


def test_unreleased_changes_in_the_common_package_are_pointed_out(repository, tmp_path):
    member = repository.find("demo-pkg")
    assert release.notes(repository, member, "0.2.0") == []
    shared = repository.root / "shared"
    shared.unlink()  # a link to the real one
    shared.mkdir()
    (shared / "pyproject.toml").write_text('[project]\nname = "chapbook-shared"\nversion = "0.1.0"\n')
    (shared / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n- A new check.\n")
    [note] = release.notes(Workspace(repository.root), member, "0.2.0")
    assert "chapbook-shared has unreleased changes" in note


def test_an_unknown_name_is_exit_2(chapbook, repository):
    done = chapbook("release", "demo", "--bump", "patch", cwd=repository.root)
    assert done.code == 2
    assert "did you mean demo-pkg?" in done.err


def test_a_commit_that_is_refused_leaves_the_tree_as_it_was(chapbook, repository):
    hook = repository.root / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho the hook says no >&2\nexit 1\n")
    hook.chmod(0o755)
    done = chapbook("release", "demo-pkg", "--bump", "patch", cwd=repository.root)
    assert done.code == 2
    assert "the hook says no" in done.err
    assert git(repository.root, "status", "--porcelain") == ""
    hook.unlink()
    assert chapbook("release", "demo-pkg", "--bump", "patch", cwd=repository.root).out == "demo-pkg-v0.1.1\n"


def test_a_pyproject_that_is_not_toml_is_exit_2_and_named(chapbook, repository):
    (repository.find("demo-pkg").folder / "pyproject.toml").write_text("name = = 3")
    done = chapbook("check", "--quick", cwd=repository.root)
    assert done.code == 2
    assert "packages/demo-pkg/pyproject.toml cannot be read" in done.err
    assert "Traceback" not in done.err
