"""A new package with a small real method in it, that passes `check` at once: replace the method, keep the shape."""

from __future__ import annotations

import keyword
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined
from packaging.utils import canonicalize_name

from .checks.imports import distributions
from .workspace import UsageError, Workspace, read

TEMPLATES = "templates/package"
SUFFIX = ".j2"


def check_name(dist: str, workspace: Workspace) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", dist) or canonicalize_name(dist) != dist:
        raise UsageError(f"a name is lower-case words joined by single hyphens, such as topograph-loss; got {dist!r}")
    import_name = dist.replace("-", "_")
    if any(member.dist == dist or member.import_name == import_name for member in workspace.members):
        raise UsageError(f"there is a {dist} already")
    if (workspace.root / "packages" / dist).exists():
        raise UsageError(f"the folder packages/{dist} exists already")
    if keyword.iskeyword(import_name):
        raise UsageError(f"{import_name} is a word of the Python language: choose another name")
    if import_name in sys.stdlib_module_names:
        raise UsageError(f"{import_name} is a module of the standard library: choose another name")
    if import_name in distributions() or find_spec(import_name) is not None:
        raise UsageError(f"another installed library is imported as {import_name}: choose another name")


def create(workspace: Workspace, dist: str) -> list[Path]:
    """Write the package and add it to the root pyproject.toml. Returns the files written or changed."""
    check_name(dist, workspace)
    root_file = workspace.root / "pyproject.toml"
    root_text = with_member(read(root_file), dist)  # before anything is written: it can refuse
    environment = Environment(
        loader=PackageLoader("chapbook", TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # the templates are Markdown, TOML and Python
    )
    import_name = dist.replace("-", "_")
    values = {"dist": dist, "import_name": import_name, "class_name": "".join(map(str.title, dist.split("-")))}
    folder = workspace.root / "packages" / dist
    written = []
    for name in environment.list_templates():
        path = folder / PurePosixPath(name.removesuffix(SUFFIX).replace("IMPORT", import_name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(environment.get_template(name).render(values), encoding="utf-8")
        written.append(path)
    licence = folder / "LICENSE"
    licence.write_text(read(workspace.root / "LICENSE"), encoding="utf-8")
    root_file.write_text(root_text, encoding="utf-8")
    return [*written, licence, root_file]


def with_member(text: str, dist: str) -> str:
    """The root pyproject.toml with the package among its dependencies and sources, each list in order."""
    text = insert_sorted(text, r"^dependencies = \[\n", f'    "{dist}[demo]",\n', r"^\]")
    text = insert_sorted(text, r"^\[tool\.uv\.sources\]\n", f"{dist} = {{ workspace = true }}\n", r"^(?=\[|\s*$|#)|\Z")
    read_back = tomllib.loads(text)
    there = f"{dist}[demo]" in read_back.get("project", {}).get("dependencies", [])
    if not there or dist not in read_back.get("tool", {}).get("uv", {}).get("sources", {}):
        raise UsageError("the root pyproject.toml does not look as expected: add the package there by hand")
    return text


def insert_sorted(text: str, start: str, line: str, end: str) -> str:
    """Put `line` into the block of lines between the two patterns, before the first line that sorts after it."""
    begin = re.search(start, text, re.MULTILINE)
    if begin is None:
        raise UsageError(f"the root pyproject.toml has no line that matches {start}")
    stop = re.compile(end, re.MULTILINE).search(text, begin.end())
    close = stop.start() if stop else len(text)
    lines = text[begin.end() : close].splitlines(keepends=True)
    place = next((index for index, other in enumerate(lines) if other.strip() > line.strip()), len(lines))
    lines.insert(place, line)
    return text[: begin.end()] + "".join(lines) + text[close:]
