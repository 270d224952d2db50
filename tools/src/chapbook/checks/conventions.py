"""Files, metadata, README and changelog."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..catalogue import paper_title
from ..interpreters import SUPPORTED
from ..workspace import Member, Workspace

README_LINES = 150
METHOD_SECTIONS = {
    "Install": r"install",
    "Use": r"us(e|age)\b",
    "Against the peers": r"against",
    "Arguments that matter": r"(arguments|hyperparameters)",
    "Differences": r"differences",
    "Limits": r"limits",
    "Citation": r"citation",
}
OTHER_SECTIONS = {name: METHOD_SECTIONS[name] for name in ("Install", "Use")}


def files(member: Member, workspace: Workspace) -> Iterator[str]:
    name = member.import_name
    needed = [
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        f"src/{name}/__init__.py",
        f"src/{name}/py.typed",
    ]
    if member.kind == "package":
        needed.append(f"src/{name}/demo.py")
    for path in needed:
        if not (member.folder / path).is_file():
            yield f"there is no {path}"
    if not any(member.folder.glob("tests/**/test_*.py")):
        yield "there is no tests/test_*.py"
    if member.kind == "package" and not any(member.folder.glob("benchmarks/bench_*.py")):
        yield "there is no benchmarks/bench_*.py"
    for init in member.folder.glob("tests/**/__init__.py"):
        yield f"{init.relative_to(member.folder)} makes the tests a package: delete it"
    tops = sorted(path.name for path in member.source.glob("*") if path.name != "__pycache__")
    if tops != [name]:
        yield f"src/ must hold the import package alone, it holds {', '.join(tops) or 'nothing'}"


def metadata(member: Member, workspace: Workspace) -> Iterator[str]:
    project = member.project
    yield from wrong_values(member)
    if member.kind == "package":
        yield from wrong_method_values(member)
    urls = project.get("urls", {})
    for label, url in urls.items():
        if not url.startswith("https://"):
            yield f"the URL {label} must start with https://, got {url!r}"
    groups = {"dependencies": project.get("dependencies", []), **project.get("optional-dependencies", {})}
    members = {str(canonicalize_name(other.dist)): other for other in workspace.members}
    for group, texts in groups.items():
        for text in texts:
            for problem in wrong_requirement(text, member, members):
                yield f"{group}: {problem}"


def wrong_values(member: Member) -> Iterator[str]:
    project = member.project
    for key, right in (("license", "Apache-2.0"), ("readme", "README.md"), ("requires-python", f">={SUPPORTED[0]}")):
        if project.get(key) != right:
            yield f"{key} must be {right!r}, got {project.get(key)!r}"
    if "LICENSE" not in project.get("license-files", []):
        yield 'license-files must name the licence: ["LICENSE"]'
    if canonicalize_name(member.dist) != member.dist:
        yield f"the name must be written in its normal form {canonicalize_name(member.dist)!r}, got {member.dist!r}"
    expected = member.dist.replace("-", "_")
    if member.import_name != expected:
        yield f"the import package must be called {expected!r}, it is {member.import_name!r}"
    try:
        Version(member.version)
    except InvalidVersion:
        yield f"the version is not valid: {member.version!r}"
    method, colon, use = project.get("description", "").partition(": ")
    if not (colon and method.strip() and use.strip()) or "\n" in use:
        yield f"description must read '<Method>: <one-line use>', got {project.get('description')!r}"
    classifiers = project.get("classifiers", [])
    for wanted in [f"Programming Language :: Python :: {version}" for version in SUPPORTED] + ["Typing :: Typed"]:
        if wanted not in classifiers:
            yield f"the classifier {wanted!r} is missing"
    if not project.get("authors"):
        yield "authors is missing"


def wrong_method_values(member: Member) -> Iterator[str]:
    if "Paper" not in member.project.get("urls", {}):
        yield "[project.urls] must have Paper"
    demos = member.project.get("entry-points", {}).get("chapbook.demos", {})
    right = {member.dist: f"{member.import_name}.demo:demo"}
    if demos != right:
        yield f'[project.entry-points."chapbook.demos"] must be {right}, got {demos}'


def wrong_requirement(text: str, member: Member, members: dict[str, Member]) -> Iterator[str]:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        yield f"{text!r} is not a requirement: {error}"
        return
    name = canonicalize_name(requirement.name)
    if name == canonicalize_name(member.dist):
        for extra in requirement.extras:
            if canonicalize_name(extra) not in member.extras:
                yield f"{text!r} names an extra that does not exist"
        return
    if requirement.url:
        yield f"{text!r} points at a URL: name a released version"
    lower = [spec.version for spec in requirement.specifier if spec.operator in (">=", ">")]
    for spec in requirement.specifier:
        if spec.operator not in (">=", ">", "!="):
            yield f"{text!r} has a pin or an upper bound ({spec}): give a lower bound alone"
    if not lower:
        yield f"{text!r} has no lower bound"
    other = members.get(name)
    if other is None:
        return
    if other.kind != "shared":
        yield f"{text!r} depends on another package of the shelf: only chapbook-shared may be depended on"
    for version in lower:
        if Version(version) > Version(other.version):
            yield f"{text!r} asks for more than the {other.version} that the workspace has"
    for extra in requirement.extras:
        if canonicalize_name(extra) not in other.extras:
            yield f"{text!r} names an extra that {other.dist} does not have"


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, its code, the line its code starts at and the last text before the fence."""

    info: str
    code: str
    line: int
    above: str


FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")


def fences(lines: Sequence[str]) -> Iterator[tuple[int, int | None, str]]:
    """Each fence of ``` or ~~~: the line that opens it, the line that closes it (None if none does), the info string."""
    start, marks, info = 0, "", ""
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if not marks:
            start, marks, info = number, fence["marks"], fence["info"].strip()
        elif fence["marks"].startswith(marks) and not fence["info"].strip():
            yield start, number, info
            marks = ""
    if marks:
        yield start, None, info


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks that are closed. A block inside a list loses the indentation of its fence."""
    lines = markdown.splitlines()
    found: list[Block] = []
    before = 0
    for start, end, info in fences(lines):
        if end is not None:
            indent = len(lines[start - 1]) - len(lines[start - 1].lstrip())
            code = [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[start : end - 1]]
            text = [line.strip() for line in lines[before : start - 1] if line.strip()]
            found.append(Block(info, "\n".join(code), start + 1, text[-1] if text else ""))
            before = end
    return found


def is_python(block: Block) -> bool:
    return block.info.split()[:1] == ["python"]


def runs(block: Block) -> bool:
    return is_python(block) and "no-run" not in block.info.split()


def readme_script(markdown: str) -> str:
    """The blocks that run, in order and as one script, each line at the number that it has in the README."""
    lines: list[str] = []
    for block in filter(runs, blocks(markdown)):
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def sections(markdown: str) -> dict[str, str]:
    """Heading of the second level -> the text below it."""
    lines = markdown.splitlines()
    fenced = {number for start, end, _ in fences(lines) for number in range(start, (end or len(lines)) + 1)}
    found: dict[str, list[str]] = {}
    current = ""
    for number, line in enumerate(lines, start=1):
        if number not in fenced and line.startswith("## "):
            current = line[3:].strip()
            found[current] = []
        elif current:
            found[current].append(line)
    return {heading: "\n".join(lines) for heading, lines in found.items()}


def readme(member: Member, workspace: Workspace) -> Iterator[str]:
    text = member.readme
    lines = text.splitlines()
    if not lines or not lines[0].startswith("# "):
        yield "the first line must be a title: '# name'"
    if member.kind == "package" and len(lines) > README_LINES:
        yield f"{len(lines)} lines do not fit one screen: keep to {README_LINES}"
    found = sections(text)
    wanted = METHOD_SECTIONS if member.kind == "package" else OTHER_SECTIONS
    for name, pattern in wanted.items():
        if not any(re.match(pattern, heading, re.IGNORECASE) for heading in found):
            yield f"the section '## {name}' is missing"
    if f"pip install {member.dist}" not in text and f"pip install '{member.dist}" not in text:
        yield f"the line 'pip install {member.dist}' is missing"
    for start, end, _ in fences(lines):
        if end is None:
            yield f"line {start}: a fence is opened and not closed: what follows is no code block"
    for block in blocks(text):
        language = block.info.split()[0] if block.info else ""
        if re.match(r"\W*(i?py|doctest)", language, re.IGNORECASE) and not is_python(block):
            yield f"line {block.line - 1}: a block of {language!r} is never run: write ```python"
        if is_python(block) and not runs(block) and not block.above:
            yield f"line {block.line - 1}: a no-run block needs a line above it that says what it needs"
    if member.kind == "package":
        yield from wrong_method_readme(text, found)


def wrong_method_readme(text: str, found: dict[str, str]) -> Iterator[str]:
    if not any(map(runs, blocks(text))):
        yield "there is no ```python block that runs with the base install"
    for heading, body in found.items():
        if re.match("against", heading, re.IGNORECASE):
            if not re.search(r"^\|.*\|$", body, re.MULTILINE):
                yield f"the section '{heading}' has no table"
            if "bench" not in body:
                yield f"the section '{heading}' does not name the command that reproduces it"
    cited = [block for block in blocks(text) if block.info == "bibtex"]
    if len(cited) != 1 or not paper_title(text):
        yield f"there must be one ```bibtex block with the title of the paper, there are {len(cited)}"
    if "https://" not in "".join(body for heading, body in found.items() if re.match("citation", heading, re.I)):
        yield "the Citation section must link the paper and the official code, where there is one"


def changelog(member: Member, workspace: Workspace) -> Iterator[str]:
    text = member.changelog
    if not text.startswith("# Changelog"):
        yield "the first line must be '# Changelog'"
    found = sections(text)
    body = next((body for heading, body in found.items() if heading.split()[:1] == [member.version]), None)
    if body is None:
        yield f"there is no section '## {member.version}'"
    elif not re.search(r"^- \S", body, re.MULTILINE):
        yield f"the section '## {member.version}' says nothing: one line a change, each starting with '- '"
