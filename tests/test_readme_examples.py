"""The code in the READMEs runs: the blocks of one README in order, in one namespace, in an empty folder."""

import pytest

from chapbook.checks.conventions import readme_script
from chapbook.workspace import find_workspace

SCRIPTS = {
    member.dist: (member.folder / "README.md", readme_script(member.readme)) for member in find_workspace().members
}


@pytest.mark.parametrize("dist", [dist for dist, (_, script) in SCRIPTS.items() if script.strip()])
def test_the_code_in_the_readme_runs(dist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, script = SCRIPTS[dist]
    exec(compile(script, str(file), "exec"), {"__name__": "__main__"})
