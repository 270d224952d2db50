"""No package knows another: what the source imports is declared, allowed and public."""

import pytest

from chapbook.checks.run import READING
from chapbook.workspace import find_workspace

WORKSPACE = find_workspace()


@pytest.mark.parametrize("member", WORKSPACE.members, ids=lambda member: member.dist)
@pytest.mark.parametrize("check", ["declared imports", "arrows", "private names"])
def test_imports(member, check):
    assert list(READING[check](member, WORKSPACE)) == []
