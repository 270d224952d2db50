"""Finished rows, and the folder of a run in which they are kept."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chapbook_shared.jobs import Store, atomic_write
from chapbook_shared.validate import check_fraction, import_extra

from .preferences import Scorer, pair

Record = dict[str, Any]


def conversation(questions: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """Turns as messages, users first; a last question may be open."""
    messages: list[dict[str, str]] = []
    for place, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        if place < len(answers):
            messages.append({"role": "assistant", "content": answers[place]})
    return messages


def answerable(instructions: Sequence[Record]) -> list[Record]:
    """The instructions worth an answer: neither dropped nor, but for case and white space, the same as an earlier one."""
    seen: set[str] = set()
    kept = []
    for record in instructions:
        text = normalised(record["instruction"])
        if record["drop"] is None and text not in seen:
            seen.add(text)
            kept.append(record)
    return kept


def normalised(text: str) -> str:
    """What two instructions that are duplicates share."""
    return " ".join(text.split()).casefold()


@dataclass(frozen=True)
class Row:
    """One instruction with its response, the turns after them, and what was found out about them."""

    instruction_record: Record
    response_record: Record
    more: tuple[tuple[Record, Record], ...] = ()
    question: Record | None = None
    """A further question that has no answer yet."""
    tags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The row's key: seed, index and cell."""
        return str(self.instruction_record["id"])

    @property
    def instruction(self) -> str:
        """The first user's text."""
        return str(self.instruction_record["instruction"])

    @property
    def response(self) -> str:
        """The answer to it."""
        return str(self.response_record["response"])

    @property
    def drop(self) -> str | None:
        """Why the row is not part of the data; None if it is."""
        return self.response_record["drop"]

    @property
    def turns(self) -> int:
        """How many questions have an answer."""
        return 1 + len(self.more)

    def conversation(self) -> list[dict[str, str]]:
        """All finished turns as messages."""
        return conversation(
            [self.instruction, *(asked["instruction"] for asked, _ in self.more)],
            [self.response, *(answer["response"] for _, answer in self.more)],
        )

    def open_conversation(self) -> list[dict[str, str]]:
        """The finished turns and the open question."""
        assert self.question is not None
        return [*self.conversation(), {"role": "user", "content": self.question["instruction"]}]

    def with_question(self, question: Record) -> Row:
        """The same with an open question at its end."""
        return replace(self, question=question)

    def with_turn(self, question: Record, answer: Record) -> Row:
        """One turn longer; a dropped response leaves the conversation as it was."""
        if answer["drop"] is not None:
            return replace(self, question=None)
        return replace(self, more=(*self.more, (question, answer)), question=None)

    def before_turn(self, turn: int) -> Row:
        """The row as it was before it had that turn."""
        return replace(self, more=self.more[: turn - 2])

    def to_dict(self) -> Record:
        """The row as it is exported: plain values, `messages` ready for TRL."""
        asked, answer = self.instruction_record, self.response_record
        row: Record = {"id": self.id, "instruction": self.instruction, "response": self.response}
        for turn, (question, reply) in enumerate(self.more, start=2):
            row |= {f"instruction_{turn}": question["instruction"], f"response_{turn}": reply["response"]}
        row["messages"] = self.conversation()
        for name in ("raw_instruction", "system", "finish_reason", "gen_input_configs", "model_revision", "created"):
            row[name] = asked.get(name)
        for name in ("reasoning", "response_finish_reason", "gen_response_configs"):
            row[name] = answer.get(name)
        row |= {"instruction_length": len(self.instruction), "response_length": len(self.response)}
        return row | dict(self.tags)


class Run:
    """The folder of a run: what is finished, at any time, also while another process writes to it."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self.store_path = self.out / "run.sqlite"
        if not self.store_path.exists():
            raise FileNotFoundError(f"no run at {self.out}: Magpie.run or `magpie-synth generate` begins one")

    @property
    def settings(self) -> Record:
        """What the run was begun with."""
        with Store(self.store_path, read_only=True) as store:
            return store.settings

    def instructions(self) -> list[Record]:
        """The records of all instructions drawn, dropped ones included, in the order of ids."""
        return sorted(self._records("instruction/").values(), key=lambda record: record["id"])

    def rows(self) -> list[Row]:
        """The finished rows, in the order of ids, with all turns and tags that are there."""
        asked = {record["id"]: record for record in answerable(self.instructions())}
        answers = {id: record for id, record in self._records("response/").items() if record["drop"] is None}
        rows = {id: Row(record, answers[id]) for id, record in asked.items() if id in answers}
        turn = 2
        while questions := self._records(f"instruction-{turn}/"):
            replies = self._records(f"response-{turn}/")
            for id in questions.keys() & replies.keys() & rows.keys():
                if rows[id].turns == turn - 1:
                    rows[id] = rows[id].with_turn(questions[id], replies[id])
            turn += 1
        tags: dict[str, Record] = {}
        for key, record in self._keyed("tag/").items():
            tags.setdefault(key.split("/", 2)[2], {}).update(record)
        return [replace(row, tags=tags.get(row.id, {})) for row in rows.values()]

    def __iter__(self) -> Iterator[Record]:
        return (row.to_dict() for row in self.rows())

    def dataset(self) -> Any:
        """The rows as a `datasets.Dataset` with a `messages` column."""
        return to_dataset(list(self))

    def put_tags(self, kind: str, tags: Mapping[str, Record]) -> None:
        """Keep what was found out about rows: id -> fields. Fields of the same kind and row are replaced."""
        with Store(self.store_path) as store:
            store.put_many([(f"tag/{kind}/{id}", record) for id, record in tags.items()], replace=True)

    def tagged(self, kind: str) -> set[str]:
        """Ids of the rows that have tags of this kind."""
        return {key.split("/", 2)[2] for key in self._keyed(f"tag/{kind}/")}

    def preferences(self, scorer: Scorer, *, test_share: float = 0.0) -> list[Record]:
        """Pairs out of the candidates that `Magpie.run_preferences` drew, with a `split` column.

        Rows whose candidates are not all there, score alike or say the same are left out. `test_share` of the rows, chosen by a hash
        of their id, are "test".
        """
        check_fraction("test_share", test_share)
        drawn: dict[str, dict[int, str]] = {}
        for key, record in self._keyed("preference/").items():
            _, id, place = key.split("/")
            drawn.setdefault(id, {})[int(place)] = record["response"]
        instructions = {row.id: row.instruction for row in self.rows()}
        made = []
        for id in sorted(drawn.keys() & instructions.keys()):
            texts = [drawn[id][place] for place in sorted(drawn[id])]
            scores = scorer([conversation([instructions[id]], [text]) for text in texts])
            if row := pair(id, instructions[id], texts, scores):
                point = int.from_bytes(hashlib.sha256(id.encode()).digest()[:7], "big") / 2**56
                made.append({**row, "split": "test" if point < test_share else "train"})
        return made

    def stats(self) -> Record:
        """How many instructions were drawn, why some were dropped, and what became of the rest, in all and by cell."""
        drawn = self.instructions()
        kept = {record["id"] for record in answerable(drawn)}
        reasons = Counter(record["drop"] or "duplicate" for record in drawn if record["id"] not in kept)
        responses = self._records("response/")
        cells: dict[int, Counter[str]] = {}
        for record in drawn:
            cells.setdefault(record["cell"], Counter())[
                "kept" if record["id"] in kept else record["drop"] or "duplicate"
            ] += 1
        return {
            "instructions": len(drawn),
            "kept_instructions": len(kept),
            "dropped_instructions": dict(sorted(reasons.items())),
            "by_cell": {str(cell): dict(sorted(counts.items())) for cell, counts in sorted(cells.items())},
            "responses": len(responses),
            "dropped_responses": dict(
                sorted(Counter(r["drop"] for r in responses.values() if r["drop"] is not None).items())
            ),
            "responses_cut_at_the_limit": sum(
                r.get("response_finish_reason") == "length" for r in responses.values() if r["drop"] is None
            ),
            "rows": len(self.rows()),
        }

    def write_stats(self) -> None:
        """Write `stats.json` next to the store."""
        with atomic_write(self.out / "stats.json") as file:
            json.dump(self.stats(), file, ensure_ascii=False, indent=1)

    def _records(self, prefix: str) -> dict[str, Record]:
        return {key.removeprefix(prefix): record for key, record in self._keyed(prefix).items()}

    def _keyed(self, prefix: str) -> dict[str, Record]:
        with Store(self.store_path, read_only=True) as store:
            return dict(store.items(prefix))


def to_dataset(rows: Iterable[Record]) -> Any:
    """Rows as a `datasets.Dataset`."""
    datasets: Any = import_extra("datasets", "magpie-synth[datasets]")
    return datasets.Dataset.from_list(list(rows))


def plain_rows(rows: Any) -> list[Record]:
    """Rows as dictionaries, from any sequence of them or a `datasets.Dataset`."""
    return [row.to_dict() if isinstance(row, Row) else dict(row) for row in rows]


def like(rows: Any, made: list[Record]) -> Any:
    """`made` as what `rows` is: a Dataset for a Dataset, else a list."""
    return to_dataset(made) if hasattr(rows, "column_names") else made
