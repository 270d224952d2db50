"""The wheel: what it holds, and that the one from the sdist is the one from the tree."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import parse_wheel_filename

from ..uv import run_uv
from ..workspace import Member

COMPILED = (".so", ".pyd", ".dll", ".dylib", ".a", ".lib", ".o", ".pyc")


def build(member: Member, folder: Path) -> tuple[Path, Path]:
    """The wheels built from the tree and from the sdist."""
    direct, through_sdist = folder / "from-tree", folder / "from-sdist"
    run_uv("build", "--quiet", "--wheel", "--out-dir", str(direct), str(member.folder))
    run_uv("build", "--quiet", "--out-dir", str(through_sdist), str(member.folder))
    return only_wheel(direct), only_wheel(through_sdist)


def only_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise RuntimeError(f"expected one wheel in {folder}, found {len(wheels)}")
    return wheels[0]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def problems(member: Member, from_tree: Path, from_sdist: Path) -> Iterator[str]:
    held = contents(from_tree)
    _, version, _, tags = parse_wheel_filename(from_tree.name)
    if any(tag.abi != "none" or tag.platform != "any" for tag in tags):
        yield f"{from_tree.name} is for one platform: a wheel of ours is pure"
    for path in sorted(path for path in held if path.lower().endswith(COMPILED)):
        yield f"the wheel holds compiled code, {path}: a wheel of ours is pure"
    info = f"{member.import_name}-{version}.dist-info"
    strange = sorted(path for path in held if path.partition("/")[0] not in (member.import_name, info))
    for path in strange:
        yield f"the wheel holds {path}: only the import package and its metadata belong there"
    sources = {
        file.relative_to(member.source).as_posix()
        for file in member.import_folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    if f"{member.import_name}/py.typed" not in held:
        yield "the wheel holds no py.typed"
    for path in sorted(sources - held.keys()):
        yield f"the wheel lacks {path}, which the tree has"
    rebuilt = contents(from_sdist)
    for path in sorted(held.keys() | rebuilt.keys()):
        if held.get(path) != rebuilt.get(path):
            where = "differs" if path in held and path in rebuilt else "is in one alone"
            yield f"{path} {where} between the wheel built from the sdist and the one built from the tree"
