"""What the source imports, read from its syntax tree: declared or not, allowed or not, private or not."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..workspace import Member, Workspace, read

Where = Literal["module", "guarded", "function", "typing"]
"""Run when the module is imported; the same, inside a `try`; when a function is called; only by a type checker."""


@dataclass(frozen=True)
class Import:
    module: str
    """Absolute name of the module imported from."""
    names: tuple[str, ...]
    """What `from module import …` asks for; empty for `import module`."""
    where: Where
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class Reader(ast.NodeVisitor):
    """Collects the imports of one module, and the private attributes of other libraries' modules that it uses."""

    def __init__(self, package: str):
        self.package = package
        """The package that relative imports start from."""
        self.imports: list[Import] = []
        self.attributes: list[tuple[str, int]] = []
        self.bound: dict[str, str] = {}
        self.where: Where = "module"

    def inside(self, where: Where, nodes: Sequence[ast.AST]) -> None:
        # A function stays a function, whatever stands inside it.
        before = self.where
        if before not in ("function", "typing"):
            self.where = where
        for node in nodes:
            self.visit(node)
        self.where = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.inside("function", node.body)
        for other in (*node.decorator_list, node.args, *filter(None, [node.returns])):
            self.visit(other)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.inside("function", [node.body])

    def visit_If(self, node: ast.If) -> None:
        typing = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        self.visit(node.test)
        self.inside("typing" if typing else self.where, node.body)
        self.inside(self.where, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        guards = any(error in caught for error in ("ImportError", "ModuleNotFoundError", "Exception"))
        self.inside("guarded" if guards else self.where, node.body)
        for part in (node.handlers, node.orelse, node.finalbody):
            self.inside(self.where, part)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, (), node.lineno)
            self.bound[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parts = self.package.split(".")
            base = parts[: len(parts) - node.level + 1]
            module = ".".join([*base, *filter(None, [module])])
        self.add(module, tuple(alias.name for alias in node.names), node.lineno)
        for alias in node.names:
            self.bound[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        # import_module("x") and import_extra("x", "dist[extra]") with the name written out.
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        called = self.bound.get(called, called).rpartition(".")[2]  # whatever name it goes by here
        if (
            called in ("import_module", "import_extra", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            name = node.args[0].value
            if isinstance(name, str) and not name.startswith("."):
                where, self.where = self.where, "function" if called == "import_extra" else self.where
                self.add(name, (), node.lineno)
                self.where = where
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_private(node.attr):
            owner: ast.expr = node.value
            path = [node.attr]
            while isinstance(owner, ast.Attribute):
                path.append(owner.attr)
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in self.bound:
                self.attributes.append((".".join([self.bound[owner.id], *reversed(path)]), node.lineno))
        self.generic_visit(node)

    def add(self, module: str, names: tuple[str, ...], line: int) -> None:
        self.imports.append(Import(module, names, self.where, line))


def read_module(file: Path, source: Path) -> Reader:
    parts = file.relative_to(source).with_suffix("").parts
    reader = Reader(".".join(parts[:-1]))
    reader.visit(ast.parse(read(file), filename=str(file)))
    return reader


def modules(member: Member) -> dict[str, Path]:
    """Dotted name -> file, of every module of the import package."""
    found = {}
    for file in sorted(member.import_folder.rglob("*.py")):
        parts = file.relative_to(member.source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_foreign(top: str, member: Member) -> bool:
    return top not in (member.import_name, "__future__") and top not in sys.stdlib_module_names


def imported_at_once(member: Member, readers: Mapping[str, Reader]) -> set[str]:
    """The modules of the package that `import package` runs."""
    waiting, reached = [member.import_name], set()
    while waiting:
        name = waiting.pop()
        if name not in readers or name in reached:
            continue
        reached.add(name)
        for made in readers[name].imports:
            if made.where in ("module", "guarded"):
                parts = made.module.split(".")
                waiting += [".".join(parts[: end + 1]) for end in range(len(parts))]
                waiting += [f"{made.module}.{asked}" for asked in made.names]
    return reached


def read_modules(member: Member) -> dict[str, Reader]:
    return {name: read_module(file, member.source) for name, file in modules(member).items()}


@cache
def distributions() -> Mapping[str, Sequence[str]]:
    return packages_distributions()


def providers(top: str, workspace: Workspace) -> set[str]:
    """The distributions that an import name comes from."""
    for member in workspace.members:
        if member.import_name == top:
            return {str(canonicalize_name(member.dist))}
    # Not installed here: by its name, which is right more often than not.
    return {str(canonicalize_name(name)) for name in distributions().get(top, [top])}


def declared(requirements: Sequence[Requirement], workspace: Workspace) -> set[str]:
    """The distributions that may be imported: those named, and what a named extra of chapbook-shared stands for."""
    names: set[str] = set()
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        names.add(name)
        for member in workspace.members:
            if member.kind == "shared" and canonicalize_name(member.dist) == name:
                for extra in requirement.extras:
                    names |= {canonicalize_name(inner.name) for inner in member.extra_requirements(extra)}
    return names


def base_declared(member: Member, workspace: Workspace) -> set[str]:
    return declared(member.requirements, workspace)


def all_declared(member: Member, workspace: Workspace) -> set[str]:
    extras = [requirement for extra in member.extras for requirement in member.extra_requirements(extra)]
    return declared([*member.requirements, *extras], workspace)


def undeclared(member: Member, workspace: Workspace) -> Iterator[str]:
    """What `import package` runs needs the base install alone; everything else needs the base install or an extra."""
    readers = read_modules(member)
    at_once = imported_at_once(member, readers)
    base, everything = base_declared(member, workspace), all_declared(member, workspace)
    for name, reader in readers.items():
        for made in reader.imports:
            if not is_foreign(made.top, member):
                continue
            needs_base = name in at_once and made.where == "module"
            allowed = base if needs_base else everything
            found = providers(made.top, workspace)
            if not found & allowed:
                place = "dependencies" if needs_base else "dependencies or an extra"
                why = " (`import " + member.import_name + "` runs this)" if needs_base and found & everything else ""
                yield f"{name}:{made.line} imports {made.module}{why}: declare {' or '.join(sorted(found))} in {place}"


def arrows(member: Member, workspace: Workspace) -> Iterator[str]:
    """Packages import chapbook-shared and no other member; nothing but the demo's and command's own module uses them."""
    others = {other.import_name: other for other in workspace.members if other.dist != member.dist}
    source = read_modules(member)
    outside = {
        str(file.relative_to(member.folder)): read_module(file, file.parent)
        for folder in ("tests", "benchmarks")
        for file in sorted((member.folder / folder).rglob("*.py"))
    }
    for name, reader in {**source, **outside}.items():
        for made in reader.imports:
            other = others.get(made.top)
            if other is not None and other.kind != "shared":
                yield f"{name}:{made.line} imports {made.module}: {member.dist} may import chapbook-shared alone"
    edges = {f"{member.import_name}.cli", f"{member.import_name}.demo"}
    for name, reader in source.items():
        if name in edges or name == f"{member.import_name}.__main__" or member.kind != "package":
            continue
        for made in reader.imports:
            for asked in {made.module, *(f"{made.module}.{asked}" for asked in made.names)} & edges:
                yield f"{name}:{made.line} imports {asked}: arrows go from the command and the demo to the method"


def private(member: Member, workspace: Workspace) -> Iterator[str]:
    """No name of another library that starts with an underscore."""
    for name, reader in read_modules(member).items():
        for made in reader.imports:
            if is_foreign(made.top, member):
                for part in [*made.module.split("."), *made.names]:
                    if is_private(part):
                        yield f"{name}:{made.line} imports the private name {part} of {made.top}"
        for path, line in reader.attributes:
            if is_foreign(path.partition(".")[0], member):
                yield f"{name}:{line} uses the private name {path}"
