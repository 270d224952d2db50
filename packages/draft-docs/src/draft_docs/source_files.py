"""New docstrings into Python source files. Only the docstring's literal changes; everything else stays byte for byte."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chapbook_shared.jobs import atomic_write
from chapbook_shared.validate import import_extra
from draft_docs.redact import visible
from draft_docs.sources.callables import docstring_for
from draft_docs.tools import ToolSpec


def rewritten_files(
    functions: Mapping[str, Callable[..., Any]], refined: Mapping[str, ToolSpec]
) -> dict[Path, tuple[str, str]]:
    """Each source file that changes, with its text before and after. Needs `draft-docs[source]`.

    Raises ValueError for a function whose source is not a Python file (built in, or made at run time).
    """
    changes: dict[Path, dict[tuple[str, ...], str]] = {}
    for name, function in functions.items():
        if name not in refined:
            continue
        docstring = docstring_for(function, refined[name])
        if docstring == (inspect.getdoc(function) or ""):
            continue
        plain = inspect.unwrap(function)
        try:
            file = inspect.getsourcefile(plain)
        except TypeError:
            file = None
        if file is None or not Path(file).is_file():
            raise ValueError(f"{name} has no source file: write its docstring by hand")
        changes.setdefault(Path(file), {})[tuple(plain.__qualname__.split("."))] = docstring
    files = {}
    for path, docstrings in changes.items():
        before = path.read_bytes().decode("utf-8")
        files[path] = (before, with_docstrings(before, docstrings, str(path)))
    return files


def with_docstrings(source: str, docstrings: Mapping[tuple[str, ...], str], name: str = "the source") -> str:
    """A module's source with new docstrings for the functions at the given paths, such as `("Class", "method")`.

    Raises ValueError if a path is not in the source.
    """
    cst = import_extra("libcst", "draft-docs[source]")
    todo = dict(docstrings)

    class Writer(cst.CSTTransformer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.path: list[str] = []

        def visit_ClassDef(self, node: Any) -> None:
            self.path.append(node.name.value)

        def leave_ClassDef(self, original_node: Any, updated_node: Any) -> Any:
            self.path.pop()
            return updated_node

        def visit_FunctionDef(self, node: Any) -> None:
            self.path.append(node.name.value)

        def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:
            docstring = todo.pop(tuple(self.path), None)
            depth = len(self.path)
            self.path[-1:] = []
            return updated_node if docstring is None else _documented(cst, updated_node, docstring, depth)

        def visit_Lambda(self, node: Any) -> bool:
            return False

    module = cst.parse_module(source)
    written = module.visit(Writer()).code
    if todo:
        raise ValueError(f"{name} does not hold {', '.join('.'.join(path) for path in todo)}")
    return str(written)


def patch(files: Mapping[Path, tuple[str, str]]) -> str:
    """The changes as a unified diff that `patch` takes; a file below the current folder is named from there."""
    return "".join(
        line
        for path, (before, after) in files.items()
        for line in difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), _shown(path), _shown(path)
        )
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def write(files: Mapping[Path, tuple[str, str]]) -> None:
    """Write each file, at once or not at all."""
    for path, (_, after) in files.items():
        with atomic_write(path, binary=True) as file:
            file.write(after.encode("utf-8"))


def _documented(cst: Any, function: Any, docstring: str, depth: int) -> Any:
    body = function.body
    if isinstance(body, cst.SimpleStatementSuite):  # def f(): return 1
        lines = [cst.SimpleStatementLine([statement]) for statement in body.body]
        body = cst.IndentedBlock(lines)
    has_one = function.get_docstring(clean=False) is not None
    indent = (body.indent or "    ") if depth == 1 else (body.indent or "    ") * depth
    literal = cst.Expr(cst.SimpleString(_literal(docstring, indent)))
    first = cst.SimpleStatementLine([literal])
    if has_one:
        old = body.body[0]
        first = old.with_changes(body=[literal, *old.body[1:]])
    return function.with_changes(body=body.with_changes(body=[first, *body.body[1 if has_one else 0 :]]))


def _literal(docstring: str, indent: str) -> str:
    """A string literal whose value is the docstring, indented as PEP 257 has it, without characters that no reader would see."""
    lines = visible(docstring).splitlines()
    text = "\n".join([lines[0], *(f"{indent}{line}" if line.strip() else "" for line in lines[1:])]) if lines else ""
    if len(lines) > 1:
        text += f"\n{indent}"
    escaped = text.replace("\\", "\\\\")
    if '"""' in text:
        escaped = escaped.replace('"', '\\"')
    elif text.endswith('"'):
        escaped = f'{escaped[:-1]}\\"'
    literal = f'"""{escaped}"""'
    assert ast.literal_eval(literal) == text
    return literal
