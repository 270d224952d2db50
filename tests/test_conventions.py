"""Every distribution keeps to the conventions of the shelf, and the shelf's own files know every distribution."""

import tomllib

import pytest

from chapbook.catalogue import catalogue, with_catalogue
from chapbook.checks.run import READING
from chapbook.workspace import find_workspace

WORKSPACE = find_workspace()
ROOT = tomllib.loads((WORKSPACE.root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("member", WORKSPACE.members, ids=lambda member: member.dist)
@pytest.mark.parametrize("check", ["files", "metadata", "readme", "changelog"])
def test_conventions(member, check):
    assert list(READING[check](member, WORKSPACE)) == []


@pytest.mark.parametrize("member", WORKSPACE.members, ids=lambda member: member.dist)
def test_a_bare_run_of_the_workspace_has_every_distribution(member):
    named = {text.partition("[")[0] for text in ROOT["project"]["dependencies"]}
    assert member.dist in named
    assert ROOT["tool"]["uv"]["sources"][member.dist] == {"workspace": True}


def test_the_catalogue_in_the_readme_is_up_to_date():
    readme = (WORKSPACE.root / "README.md").read_text(encoding="utf-8")
    assert with_catalogue(readme, catalogue()) == readme, "run: chapbook list --readme"


def test_every_package_is_in_the_catalogue():
    assert [entry.package for entry in catalogue()] == [member.dist for member in WORKSPACE.packages]


@pytest.mark.parametrize("member", WORKSPACE.members, ids=lambda member: member.dist)
def test_each_distribution_carries_the_licence_of_the_whole(member):
    assert (member.folder / "LICENSE").read_bytes() == (WORKSPACE.root / "LICENSE").read_bytes()
