"""A run, finished or not, read back from its store without its source or its model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from chapbook_shared.jobs import Store
from draft_docs.drafter import Counts, DraftResult, ToolDraft, made_calls
from draft_docs.loop import Iteration, Refined
from draft_docs.tools import Hints, ToolSpec


def read_run(path: str | Path) -> DraftResult:
    """What the store of a run holds: each tool as far as it came. It may be read while the run goes on.

    Of a tool whose source has changed between runs, the latest version counts. `counts` are of all that is in the store.
    Raises FileNotFoundError if there is no such file, ValueError if it is no store of a run.
    """
    with closing(Store(path, read_only=True)) as store:
        records = dict(store.items())
    tools: dict[str, ToolDraft] = {}
    for key, record in records.items():
        if key.startswith("tool/"):
            home = key.removeprefix("tool/")
            tools[record["name"]] = ToolDraft(_refined(home, record, records))
    if not tools:
        raise ValueError(f"{path} holds no run: it was not written by draft-docs, or nothing has been done yet")
    chats = [record["usage"] for key, record in records.items() if key.startswith("chat/")]
    prompt, completion = (sum(usage[kind] for usage in chats) for kind in ("prompt_tokens", "completion_tokens"))
    calls = made_calls(records.items()).total()
    vectors = sum(key.startswith("vector/") for key in records)
    open_ = [name for name, draft in tools.items() if draft.refined.stopped == "interrupted"]
    stopped_by = f"not finished: {', '.join(open_)}" if open_ else ""
    return DraftResult(tools, Counts(len(chats), prompt, completion, calls, vectors), "", stopped_by)


def _refined(home: str, record: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> Refined:
    before = ToolSpec(**{**record, "hints": Hints(**record["hints"])})
    iterations: list[Iteration] = []
    while (found := records.get(f"iteration/{home}/{len(iterations) + 1}")) is not None:
        iterations.append(Iteration.from_record(dict(found)))
    after = before
    for iteration in iterations:
        if iteration.accepted:
            after = after.with_docs(iteration.description, iteration.parameters)
    end = records.get(f"end/{home}", {"stopped": "interrupted", "note": ""})
    return Refined(before, after, tuple(iterations), end["stopped"], end["note"])
