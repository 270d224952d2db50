"""`chapbook check`: a sound package passes, and each thing that can be amiss is found and named."""

import sys
import zipfile
from pathlib import Path

import pytest

from chapbook.checks import alone, conventions, imports, wheels
from chapbook.checks.run import READING, run_checks
from chapbook.scaffold import create
from chapbook.uv import UvError
from chapbook.workspace import Workspace


@pytest.fixture
def edit(workspace):
    """Change a file of demo-pkg, then read the problems that one check finds."""

    class Edit:
        def __init__(self):
            self.folder = workspace.find("demo-pkg").folder

        def write(self, path, text):
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return self

        def replace(self, path, old, new):
            text = (self.folder / path).read_text(encoding="utf-8")
            assert old in text
            return self.write(path, text.replace(old, new))

        def append(self, path, text):
            return self.write(path, (self.folder / path).read_text(encoding="utf-8") + text)

        def remove(self, path):
            (self.folder / path).unlink()
            return self

        @property
        def member(self):
            return Workspace(workspace.root).find("demo-pkg")

        def problems(self, check):
            fresh = Workspace(workspace.root)
            return list(check(fresh.find("demo-pkg"), fresh))

    return Edit()


METHOD = "src/demo_pkg/trimming.py"
FACE = "src/demo_pkg/__init__.py"


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "src/demo_pkg/py.typed",
        "src/demo_pkg/demo.py",
        "benchmarks/bench_trimming.py",
    ],
)
def test_a_missing_file_is_named(edit, path):
    [problem] = edit.remove(path).problems(conventions.files)
    assert path.split("/")[-1].split("_")[0] in problem


def test_a_second_import_package_is_found(edit):
    problems = edit.write("src/other/__init__.py", "").problems(conventions.files)
    assert any("demo_pkg, other" in problem for problem in problems)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('license = "Apache-2.0"', 'license = "MIT"', "license must be 'Apache-2.0', got 'MIT'"),
        ('">=3.11"', '">=3.11,<3.14"', "requires-python must be '>=3.11'"),
        ('    "Typing :: Typed",\n', "", "'Typing :: Typed' is missing"),
        ("Trimmed mean: a", "A", "description must read"),
        ("Paper = ", "Papers = ", "must have Paper"),
        ("https://doi", "http://doi", "must start with https://"),
        ('"numpy>=1.26"', '"numpy"', "'numpy' has no lower bound"),
        ('"numpy>=1.26"', '"numpy==1.26.4"', "pin or an upper bound (==1.26.4)"),
        ('"numpy>=1.26"', '"numpy>=1.26,<3"', "pin or an upper bound (<3)"),
        ('"numpy>=1.26"', '"numpy~=1.26"', "pin or an upper bound (~=1.26)"),
        ('"numpy>=1.26"', '"numpy @ https://example.org/numpy.whl"', "points at a URL"),
        ('"numpy>=1.26"', '"numpy>>1"', "is not a requirement"),
        ('"chapbook-shared>=0.1"', '"chapbook-shared>=99"', "asks for more than"),
        ("chapbook-shared[plot]", "chapbook-shared[paint]", "an extra that chapbook-shared does not have"),
        ('"chapbook-shared[plot]>=0.1"', '"demo-pkg[all]"', "names an extra that does not exist"),
        ("demo_pkg.demo:demo", "demo_pkg.demo:main", "chapbook.demos"),
    ],
)
def test_wrong_metadata_is_named(edit, old, new, problem):
    assert any(problem in found for found in edit.replace("pyproject.toml", old, new).problems(conventions.metadata))


def test_a_dependency_on_another_package_of_the_shelf_is_found(edit, workspace):
    create(workspace, "other-pkg")
    edit.replace("pyproject.toml", '"numpy>=1.26"', '"other-pkg>=0.1"')
    [problem] = edit.problems(conventions.metadata)
    assert "only chapbook-shared may be depended on" in problem


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("## Limits\n", "## Boundaries\n", "'## Limits' is missing"),
        ("## Differences\n", "", "'## Differences' is missing"),
        ("# demo-pkg\n", "demo-pkg\n", "first line must be a title"),
        ("pip install demo-pkg", "pip install it", "the line 'pip install demo-pkg' is missing"),
        ("```python\n", "```python no-run\n", "no ```python block that runs"),
        ("|", "", "has no table"),
        ("title = {", "name = {", "the title of the paper"),
        ("[The paper](https://doi.org/10.1214/aoms/1177704711)", "The paper", "must link the paper"),
    ],
)
def test_what_the_readme_lacks_is_named(edit, old, new, problem):
    assert any(problem in found for found in edit.replace("README.md", old, new).problems(conventions.readme))


def test_a_readme_of_two_screens_is_too_long(edit):
    [problem] = edit.append("README.md", "\nword" * 150).problems(conventions.readme)
    assert "keep to 150" in problem


def test_a_heading_inside_a_code_block_is_no_section():
    assert list(conventions.sections("## Use\n```python\n## Limits\n```\n")) == ["Use"]


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("~~~python\na = 1\n~~~\n", "a = 1"),
        ("~~~~ python\na = '~~~'\n~~~\n~~~~~\n", "a = '~~~'\n~~~"),
        ("````\n```python\nx\n```\n````\n```python\na = 1\n```\n", "a = 1"),
        ("- so:\n  ```python\n  if 1:\n      a = 1\n\n  ```\n", "if 1:\n    a = 1"),
        ("```python\na = 1\n~~~\n```\n", "a = 1\n~~~"),
        ("~~~python\na = 1\n", ""),
    ],
)
def test_every_way_to_write_a_block_is_one(text, script):
    assert conventions.readme_script(text).strip() == script


def test_a_heading_inside_a_block_of_tildes_is_no_section():
    assert list(conventions.sections("## Use\n~~~python\n## Limits\n```\n~~~\n## End\n")) == ["Use", "End"]


def test_a_readme_runs_as_one_script_with_its_own_line_numbers():
    text = "# t\n```python\na = 1\n```\nneeds x\n```python no-run\nb\n```\n```python\nprint(a)\n```\n"
    script = conventions.readme_script(text).splitlines()
    assert [(number, line) for number, line in enumerate(script, 1) if line] == [(3, "a = 1"), (10, "print(a)")]


def test_a_block_that_is_not_run_says_what_it_needs(edit):
    edit.append("README.md", "\n```python no-run\nx\n```\n```python no-run\ny\n```\n")
    assert any("a no-run block needs a line above" in problem for problem in edit.problems(conventions.readme))


def test_a_version_without_a_changelog_entry_is_found(edit):
    [problem] = edit.replace("pyproject.toml", '"0.1.0"', '"0.2.0"').problems(conventions.changelog)
    assert problem == "there is no section '## 0.2.0'"


def test_a_dated_changelog_entry_counts_and_an_empty_one_does_not(edit):
    assert edit.replace("CHANGELOG.md", "## 0.1.0", "## 0.1.0 - 2026-01-01").problems(conventions.changelog) == []
    [problem] = edit.write("CHANGELOG.md", "# Changelog\n\n## 0.1.0\n").problems(conventions.changelog)
    assert "says nothing" in problem


@pytest.mark.parametrize(
    "code",
    [
        "import scipy",
        "from scipy import stats",
        "def f():\n    import scipy.stats",
        "if True:\n    import scipy",
        "from importlib import import_module\nimport_module('scipy.stats')",
        "try:\n    import scipy\nexcept ImportError:\n    scipy = None",
    ],
)
def test_an_import_that_is_not_declared_is_found(edit, code):
    [problem] = edit.append(METHOD, f"\n\n{code}\n").problems(imports.undeclared)
    assert "scipy" in problem
    assert "declare scipy" in problem


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    import matplotlib",
        "def f():\n    return import_extra('matplotlib', 'demo-pkg[demo]')",
        "try:\n    import matplotlib\nexcept ImportError:\n    matplotlib = None",
        "import typing\nif typing.TYPE_CHECKING:\n    import matplotlib",
        "import json, os.path\nfrom numpy.linalg import norm",
    ],
)
def test_an_extra_may_be_imported_where_it_is_not_always_run(edit, code):
    # matplotlib is what chapbook-shared[plot], in the extra `demo`, stands for.
    assert edit.append(METHOD, f"\n\n{code}\n").problems(imports.undeclared) == []


def test_an_extra_may_not_be_imported_where_importing_the_package_runs_it(edit):
    [problem] = edit.append(METHOD, "\n\nimport matplotlib\n").problems(imports.undeclared)
    assert "`import demo_pkg` runs this" in problem
    assert "declare matplotlib in dependencies" in problem


def test_an_extra_may_be_imported_by_a_module_that_the_face_does_not_reach(edit):
    assert edit.write("src/demo_pkg/plots.py", "import matplotlib\n").problems(imports.undeclared) == []
    lazy = "\n\ndef __getattr__(name):\n    from . import plots\n\n    return getattr(plots, name)\n"
    assert edit.append(FACE, lazy).problems(imports.undeclared) == []
    assert len(edit.append(FACE, "\nfrom .plots import matplotlib\n").problems(imports.undeclared)) == 1


@pytest.mark.parametrize("path", [METHOD, "tests/test_more.py", "benchmarks/bench_more.py"])
@pytest.mark.parametrize("code", ["import other_pkg", "def f():\n    from other_pkg.trimming import trimmed_mean"])
def test_an_import_of_another_package_is_found(edit, workspace, path, code):
    create(workspace, "other-pkg")
    (edit.folder / path).touch()
    [problem] = edit.append(path, f"\n\n{code}\n").problems(imports.arrows)
    assert "demo-pkg may import chapbook-shared alone" in problem


def test_the_method_may_not_use_the_demo(edit):
    [problem] = edit.append(METHOD, "\n\nfrom .demo import errors\n").problems(imports.arrows)
    assert "demo_pkg.trimming:" in problem
    assert "arrows go from" in problem


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from numpy import _core", "_core"),
        ("from numpy._core import multiarray", "_core"),
        ("import numpy._core", "_core"),
        ("np._core.multiarray", "numpy._core"),
        ("from numpy import linalg\nlinalg._umath_linalg", "numpy.linalg._umath_linalg"),
    ],
)
def test_a_private_name_of_another_library_is_found(edit, code, name):
    problems = edit.append(METHOD, f"\n\n{code}\n").problems(imports.private)
    assert problems
    assert all(name in problem for problem in problems)


@pytest.mark.parametrize(
    "code",
    [
        "np.__version__",
        "import os\nos._exit",
        "from . import _own",
        "class A:\n    def f(self):\n        return self._x",
    ],
)
def test_these_are_not_private_names_of_another_library(edit, code):
    assert edit.append(METHOD, f"\n\n{code}\n").problems(imports.private) == []


def test_importing_more_than_the_base_declares_is_found(edit):
    assert edit.problems(alone.light) == []
    # Hidden from a reader of the imports, as a library is that imports whatever it finds.
    edit.append(METHOD, "\n\n__import__('mat' + 'plotlib')\n")
    problems = edit.problems(alone.light)
    assert any("loads matplotlib (from matplotlib) because it is there" in problem for problem in problems)


def test_a_package_that_does_not_import_is_found(edit):
    [problem] = edit.append(FACE, "\nraise RuntimeError('no luck')\n").problems(alone.light)
    assert "no luck" in problem


def test_a_tree_with_a_syntax_error_is_a_finding_and_the_other_checks_go_on(edit, workspace):
    edit.append(METHOD, "\n\ndef (\n")
    fresh = Workspace(workspace.root)
    results = list(run_checks(fresh, [fresh.find("demo-pkg")], interpreters={}, quick=True))
    wrong = {result.check for result in results if not result.passed}
    assert wrong == {"declared imports", "arrows", "private names", "light import"}
    assert any("SyntaxError" in problem for result in results for problem in result.problems)
    assert {result.check for result in results} == {*READING, "light import"}


@pytest.fixture
def wheel_files(edit):
    source = edit.member.source
    return {
        **{file.relative_to(source).as_posix(): file.read_text() for file in source.rglob("*.*") if file.is_file()},
        "demo_pkg-0.1.0.dist-info/METADATA": "Name: demo-pkg\n",
    }


def wheel_problems(edit, tmp_path, files, rebuilt=None):
    def write(folder, files):
        folder.mkdir()
        wheel = folder / "demo_pkg-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
        return wheel

    made = write(tmp_path / "tree", files), write(tmp_path / "sdist", files if rebuilt is None else rebuilt)
    return list(wheels.problems(edit.member, *made))


def test_a_sound_wheel_passes(edit, tmp_path, wheel_files):
    assert wheel_problems(edit, tmp_path, wheel_files) == []


def test_a_stray_top_level_in_the_wheel_is_found(edit, tmp_path, wheel_files):
    [problem] = wheel_problems(edit, tmp_path, {**wheel_files, "tests/test_it.py": ""})
    assert "the wheel holds tests/test_it.py" in problem


@pytest.mark.parametrize("name", ["fast.cpython-311-x86_64-linux-gnu.so", "fast.pyd", "lib.dylib"])
def test_compiled_code_is_found_whatever_the_name_of_the_wheel_says(edit, tmp_path, wheel_files, name):
    edit.write(f"src/demo_pkg/{name}", "")
    [problem] = wheel_problems(edit, tmp_path, {**wheel_files, f"demo_pkg/{name}": ""})
    assert problem == f"the wheel holds compiled code, demo_pkg/{name}: a wheel of ours is pure"


def test_a_wheel_without_py_typed_is_found(edit, tmp_path, wheel_files):
    edit.remove("src/demo_pkg/py.typed")
    del wheel_files["demo_pkg/py.typed"]
    assert wheel_problems(edit, tmp_path, wheel_files) == ["the wheel holds no py.typed"]


def test_package_data_that_the_wheel_lacks_is_found(edit, tmp_path, wheel_files):
    edit.write("src/demo_pkg/prompts/ask.txt", "?")
    [problem] = wheel_problems(edit, tmp_path, wheel_files)
    assert problem == "the wheel lacks demo_pkg/prompts/ask.txt, which the tree has"


def test_a_wheel_from_the_sdist_that_differs_is_found(edit, tmp_path, wheel_files):
    rebuilt = {**wheel_files, "demo_pkg/trimming.py": "changed"}
    del rebuilt["demo_pkg/py.typed"]
    first, second = wheel_problems(edit, tmp_path, wheel_files, rebuilt)
    assert first.startswith("demo_pkg/py.typed is in one alone")
    assert second.startswith("demo_pkg/trimming.py differs")


def run_alone(edit, monkeypatch, folder, **install):
    environment = alone.Environment(Path(sys.executable), folder)
    monkeypatch.setattr(alone.Environment, "install", install.get("install", lambda self, *wheels: None))
    monkeypatch.setattr(alone.Environment, "python", property(lambda self: Path(sys.executable)))
    variables = {**environment.variables(), "PYTHONPATH": str(edit.member.source)}
    monkeypatch.setattr(alone.Environment, "variables", lambda self: variables)
    return list(alone.problems(edit.member, environment, []))


def test_a_sound_package_stands_alone(edit, monkeypatch, bytecode):
    assert run_alone(edit, monkeypatch, bytecode) == []


def test_a_name_in_all_that_is_not_there_is_found(edit, monkeypatch, bytecode):
    edit.replace(FACE, '["trimmed_mean"]', '["trimmed_mean", "no_such_name"]')
    [problem] = run_alone(edit, monkeypatch, bytecode)
    assert "demo_pkg.no_such_name raises AttributeError" in problem


def test_a_missing_extra_must_name_the_install_line(edit, monkeypatch, bytecode):
    edit.write("src/demo_pkg/glue.py", "import no_such_library\n")
    [problem] = run_alone(edit, monkeypatch, bytecode)
    assert "it should raise ImportError with the line pip install 'demo-pkg[…]'" in problem
    named = "from chapbook_shared.validate import import_extra\nimport_extra('no_such_library', 'demo-pkg[demo]')\n"
    edit.write("src/demo_pkg/glue.py", named)
    assert run_alone(edit, monkeypatch, bytecode) == []


def test_readme_code_that_fails_is_found_with_its_line(edit, monkeypatch, bytecode):
    edit.replace("README.md", "print(trimmed_mean", "print(trimmed_median")
    [problem] = run_alone(edit, monkeypatch, bytecode)
    assert "NameError: name 'trimmed_median' is not defined" in problem
    number = edit.member.readme.splitlines().index("print(trimmed_median(values, share=0.2))  # 3.0") + 1
    assert f"line {number}" in problem


def test_a_slow_import_is_found(edit, monkeypatch, bytecode):
    monkeypatch.setattr(alone, "IMPORT_SECONDS", 0.001)
    [problem] = run_alone(edit, monkeypatch, bytecode)
    assert "import demo_pkg takes" in problem
    assert "more than 0.001 s" in problem


def test_a_wheel_that_does_not_install_is_one_finding(edit, monkeypatch, bytecode):
    def install(self, *wheels):
        raise UvError("uv pip install failed: no such version")

    [problem] = run_alone(edit, monkeypatch, bytecode, install=install)
    assert problem == "the wheel does not install alone: uv pip install failed: no such version"


def test_the_command_says_what_is_amiss_and_exits_1(chapbook, edit, workspace):
    edit.remove("LICENSE")
    done = chapbook("check", "demo-pkg", "--quick", "--json", cwd=workspace.root)
    assert done.code == 1
    assert done.json["passed"] is False
    found = {check["check"]: check["problems"] for check in done.json["packages"]["demo-pkg"]}
    assert found["files"] == ["there is no LICENSE"]
    assert found["metadata"] == []
    assert "amiss: demo-pkg" in done.err


def test_the_table_has_a_row_for_each_check(chapbook, workspace):
    done = chapbook("check", "demo-pkg", "--quick", cwd=workspace.root)
    assert done.code == 0
    for check in READING:
        assert check in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no distribution is called 'nobody'"),
        (["demo-pkg", "--python", "2.7"], "--python must be one of 3.11, 3.12, 3.13 or all, got '2.7'"),
    ],
)
def test_wrong_use_is_exit_2(chapbook, workspace, arguments, message):
    done = chapbook("check", *arguments, cwd=workspace.root)
    assert done.code == 2
    assert message in done.err


def test_outside_a_workspace_is_exit_2(chapbook):
    done = chapbook("check")
    assert done.code == 2
    assert "lies in no chapbook workspace" in done.err


@pytest.mark.slow
def test_a_new_package_passes_everything(chapbook, workspace):
    done = chapbook("check", "demo-pkg", cwd=workspace.root)
    assert done.code == 0, done.out


@pytest.mark.parametrize(
    "code",
    [
        "from importlib import import_module as im\nim('other')",
        "__import__('other')",
        "import importlib as i\ni.import_module('other')",
    ],
)
def test_an_import_by_another_name_is_still_an_import(edit, code):
    problems = edit.write("src/demo_pkg/more.py", code + "\n").problems(imports.undeclared)
    assert any("imports other" in problem for problem in problems)


@pytest.mark.parametrize(
    ("fence", "problem"),
    [
        ("```py\n1\n```", "'py' is never run"),
        ("~~~Python3\n1\n~~~", "'Python3' is never run"),
        ("```{.python}\n1\n```", "'{.python}' is never run"),
        ("```python,no-run\n1\n```", "'python,no-run' is never run"),
        ("```python\n1", "not closed"),
        ("~~~python\n1\n```", "not closed"),
    ],
)
def test_code_that_would_never_run_is_found(edit, fence, problem):
    assert any(problem in found for found in edit.append("README.md", f"\n{fence}\n").problems(conventions.readme))
