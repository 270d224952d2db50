"""What is on the shelf, from installed metadata and the entry points of `chapbook.demos`.

A package is found by what it registers and never imported. In an editable install the README is read from the source
tree, because the copy in the metadata is as old as the last sync.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from urllib.parse import unquote, urlparse

from chapbook_shared.demo import ENTRY_POINT_GROUP

BEGIN = "<!-- catalogue: written by `chapbook list --readme`, do not edit -->"
END = "<!-- end of catalogue -->"


@dataclass(frozen=True)
class Entry:
    """One package of the shelf."""

    package: str
    version: str
    method: str
    use: str
    """What it is for, in one line."""
    paper: str
    """The title of the paper; empty if the README cites none."""
    paper_url: str
    install: str
    summary: str


def demo_entry_points() -> dict[str, EntryPoint]:
    """Distribution -> its demo, by name."""
    points = {point.dist.name if point.dist else point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    return dict(sorted(points.items()))


def catalogue() -> list[Entry]:
    return [entry(point.dist) for point in demo_entry_points().values() if point.dist is not None]


def entry(dist: Distribution) -> Entry:
    summary = str(dist.metadata.json.get("summary", ""))
    method, _, use = summary.partition(": ")
    urls = dict(line.split(", ", 1) for line in dist.metadata.get_all("Project-URL", []) if ", " in line)
    return Entry(
        package=dist.name,
        version=dist.version,
        method=method,
        use=use,
        paper=paper_title(readme(dist)),
        paper_url=urls.get("Paper", ""),
        install=f"pip install {dist.name}",
        summary=summary,
    )


def readme(dist: Distribution) -> str:
    folder = editable_folder(dist)
    if folder is not None and (folder / "README.md").is_file():
        return (folder / "README.md").read_text(encoding="utf-8")
    payload = dist.metadata.json.get("description", "")
    return payload if isinstance(payload, str) else ""


def editable_folder(dist: Distribution) -> Path | None:
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))


def paper_title(readme: str) -> str:
    """The `title` of the first bibtex block, without the braces that only protect capitals."""
    block = re.search(r"^(```|~~~)bibtex\n(.*?)^\1", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        return ""
    start = re.search(r"\btitle\s*=\s*([{\"])", block[2])
    if start is None:
        return ""
    text = block[2][start.end() :]
    if start[1] == '"':
        inside = text.partition('"')[0]
    else:
        depth, end = 1, 0
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        inside = text[: end - 1]
    return " ".join(inside.replace("{", "").replace("}", "").split())


def markdown(entries: Iterable[Entry]) -> str:
    """The catalogue as the table of the README."""
    lines = ["| Package | Method and paper | Use | Install | Version |", "|---|---|---|---|---|"]
    for row in entries:
        paper = f"[{cell(row.paper)}]({row.paper_url})" if row.paper and row.paper_url else cell(row.paper)
        method = f"{cell(row.method)}: {paper}" if paper else cell(row.method)
        link = f"[{row.package}](packages/{row.package})"
        lines.append(f"| {link} | {method} | {cell(row.use)} | `{row.install}` | {row.version} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", r"\|")


def with_catalogue(readme: str, entries: Sequence[Entry]) -> str:
    """The README with the table between its two markers replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no place for the catalogue: it needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{markdown(entries)}\n\n{END}{after}"
