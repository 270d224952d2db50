"""Bags of completions: what both sides of a test are.

A completion is a string (compared by Unicode code point) or a sequence of token ids; never a mixture. Nothing is normalised
unless asked for: two servers that differ in NFC and NFD do differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from chapbook_shared.validate import check_int
from mmd_equality.kernels import PAD

__all__ = ["Completion", "PromptId", "Samples"]

PromptId = str | int
Completion = str | tuple[int, ...]
Level = Literal["char", "token"]
_MOST_BYTES = 2_000_000_000  # of one encoded sample


@dataclass(frozen=True, eq=False)
class Samples:
    """Completions of some prompts, in the order in which they were sampled.

    prompt_ids: N labels (str or int). completions: N strings, or N sequences of token ids. level: "char" or "token", found
    from the completions when None. design: "fixed" (a set number of completions for each prompt) or "random" (each prompt was
    drawn anew). failures: requests that never gave a completion, by prompt; they are counted, not sampled. meta: free.
    """

    prompt_ids: Sequence[PromptId]
    completions: Sequence[Any]
    level: Level | None = None
    design: Literal["fixed", "random"] = "fixed"
    failures: Mapping[PromptId, int] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "completions"):
            if isinstance(getattr(self, name), (str, bytes)):
                raise TypeError(f"{name} must be a sequence with one entry for each completion, got one text")
        ids = tuple(self.prompt_ids)
        for row, label in enumerate(ids):
            if isinstance(label, bool) or not isinstance(label, (str, int, np.integer)):
                raise TypeError(f"prompt_ids[{row}] must be a str or an int, got {type(label).__name__}: {label!r}")
        ids = tuple(label if isinstance(label, str) else int(label) for label in ids)
        raw = list(self.completions)
        if len(ids) != len(raw):
            raise ValueError(
                f"prompt_ids has {len(ids)} entries but completions has {len(raw)}: one label a completion"
            )
        if self.level not in (None, "char", "token"):
            raise ValueError(f"level must be 'char' or 'token', got {self.level!r}")
        if self.design not in ("fixed", "random"):
            raise ValueError(f"design must be 'fixed' or 'random', got {self.design!r}")
        level: Level = self.level or ("token" if raw and not isinstance(raw[0], str) else "char")
        object.__setattr__(self, "prompt_ids", ids)
        object.__setattr__(self, "completions", tuple(_checked(c, row, level) for row, c in enumerate(raw)))
        object.__setattr__(self, "level", level)
        for label, failed in self.failures.items():
            check_int(f"failures[{label!r}]", failed, minimum=0)
        object.__setattr__(self, "failures", dict(self.failures))
        object.__setattr__(self, "meta", dict(self.meta))

    def __len__(self) -> int:
        return len(self.completions)

    def __repr__(self) -> str:
        failed = f", {sum(self.failures.values())} failed" if self.failures else ""
        return f"Samples({len(self)} completions of {len(self.counts)} prompts, level={self.level!r}{failed})"

    @property
    def counts(self) -> dict[PromptId, int]:
        """Completions of each prompt, in order of first appearance."""
        return dict(Counter(self.prompt_ids))

    @property
    def failure_rate(self) -> float:
        """Share of requests that gave no completion."""
        failed = sum(self.failures.values())
        return failed / (failed + len(self)) if failed else 0.0

    def rows_of(self) -> dict[PromptId, list[int]]:
        """Row numbers of each prompt, in order of first appearance."""
        out: dict[PromptId, list[int]] = {}
        for row, label in enumerate(self.prompt_ids):
            out.setdefault(label, []).append(row)
        return out

    # -- building

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        *,
        source: str = "rows",
        normalize: str | None = None,
        level: Level | None = None,
    ) -> Samples:
        """From records with `prompt_id` and `completion` (a string), or `token_ids` when level="token".

        A record with `error` and no completion is a failed request. Other fields go to `meta`: settings hashes, served model
        names and usage are gathered there. Text is kept as it is; normalize="NFC" (or NFD, NFKC, NFKD) changes it.
        """
        ids: list[PromptId] = []
        completions: list[Any] = []
        failures: Counter[PromptId] = Counter()
        gathered: dict[str, Counter[str]] = {
            "settings_hash": Counter(),
            "served_model": Counter(),
            "provider": Counter(),
        }
        finish: Counter[str] = Counter()
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "rows": 0}
        warned: Counter[str] = Counter()
        requested = 0
        for number, row in enumerate(rows, 1):
            if "prompt_id" not in row:
                raise ValueError(
                    f"{source}, row {number}: no 'prompt_id' (fields: {', '.join(map(str, row)) or 'none'})"
                )
            where = f"{source}, row {number}"
            label = row["prompt_id"]
            if isinstance(label, bool) or not isinstance(label, (str, int)):
                raise TypeError(f"{where}: prompt_id must be a str or an int, got {type(label).__name__}: {label!r}")
            requested = max(requested, _count(row, "max_tokens", where))
            codes = row.get("warnings") or ()
            for code in (codes,) if isinstance(codes, str) else codes:
                warned[str(code)] += 1
            value = _completion_of(row, level, where)
            if value is None:
                if row.get("error"):
                    failures[label] += 1
                    continue
                raise TypeError(f"{where}: the completion is missing or None and no 'error' says why")
            ids.append(label)
            completions.append(value)
            for name, seen in gathered.items():
                if row.get(name) is not None:
                    seen[str(row[name])] += 1
            if row.get("finish_reason") is not None:
                finish[str(row["finish_reason"])] += 1
            spent = row.get("usage")
            if isinstance(spent, Mapping):
                usage["prompt_tokens"] += _count(spent, "prompt_tokens", where)
                usage["completion_tokens"] += _count(spent, "completion_tokens", where)
                usage["rows"] += 1
        meta: dict[str, Any] = {"source": source}
        meta.update({name: dict(seen) for name, seen in gathered.items() if seen})
        if finish:
            meta["finish_reason"] = dict(finish)
        if warned:
            meta["sampling_warnings"] = dict(warned)
        if usage["rows"]:
            meta["usage"] = usage
        if requested:
            meta["max_tokens"] = requested
        out = cls(ids, completions, level=level, failures=failures, meta=meta)
        return out.normalized(normalize) if normalize else out

    @classmethod
    def from_jsonl(cls, path: str | Path, *, normalize: str | None = None, level: Level | None = None) -> Samples:
        """Read a JSON-lines file (UTF-8), one record a line; see `from_rows` for the fields.

        A torn last line, left by a process that was killed, is dropped and noted in `meta`; a broken line elsewhere is an error.
        """
        path = Path(path)
        torn: list[int] = []
        out = cls.from_rows(_read_jsonl(path, torn), source=str(path), normalize=normalize, level=level)
        if torn:
            return _replace(out, meta={**out.meta, "torn_last_line": torn[0]})
        return out

    @classmethod
    def from_dataset(
        cls,
        dataset: Iterable[Mapping[str, Any]],
        *,
        prompt_column: str = "prompt_id",
        completion_column: str = "completion",
    ) -> Samples:
        """From a Hugging Face dataset, or any iterable of mappings with these two columns."""
        rows = [(row[prompt_column], row[completion_column]) for row in dataset]
        return cls([r[0] for r in rows], [r[1] for r in rows], meta={"source": "dataset"})

    def to_jsonl(self, path: str | Path) -> None:
        """Write `prompt_id` and `completion` (or `token_ids`), one record a line, atomically; failed requests come last."""
        from chapbook_shared.jobs import atomic_write

        with atomic_write(path) as file:
            for label, completion in zip(self.prompt_ids, self.completions, strict=True):
                file.write(json.dumps({"prompt_id": label, **completion_fields(completion)}, ensure_ascii=True) + "\n")
            for label, count in self.failures.items():
                for _ in range(count):
                    file.write(json.dumps({"prompt_id": label, "completion": None, "error": "failed request"}) + "\n")

    # -- changing

    def map(self, f: Callable[[Any], Any]) -> Samples:
        """The same samples with f applied to every completion."""
        return _replace(self, completions=[f(c) for c in self.completions])

    def normalized(self, form: str) -> Samples:
        """Unicode normalisation of every completion: NFC, NFD, NFKC or NFKD."""
        if form not in ("NFC", "NFD", "NFKC", "NFKD"):
            raise ValueError(f"normalize must be one of NFC, NFD, NFKC, NFKD; got {form!r}")
        if self.level != "char":
            raise TypeError("Unicode normalisation is for text, but these samples are token ids")
        normal: Any = form
        return self.map(lambda text: unicodedata.normalize(normal, text))

    def until(self, eos: int | Iterable[int]) -> Samples:
        """Token ids up to and including the first end-of-sequence token, wherever it stands (also when it comes first)."""
        stops = {eos} if isinstance(eos, int) else set(eos)
        if self.level != "token":
            raise TypeError("an end-of-sequence id is for token ids, but these samples are text")

        def cut(ids: tuple[int, ...]) -> tuple[int, ...]:
            for i, token in enumerate(ids):
                if token in stops:
                    return ids[: i + 1]
            return ids

        return self.map(cut)

    def take(self, rows: Sequence[int] | NDArray[np.integer[Any]]) -> Samples:
        """Only these rows, in this order. Failures are kept."""
        index = [int(i) for i in rows]
        return _replace(
            self, prompt_ids=[self.prompt_ids[i] for i in index], completions=[self.completions[i] for i in index]
        )

    def only(self, prompts: Iterable[PromptId]) -> Samples:
        """Only these prompts."""
        keep = set(prompts)
        out = self.take([i for i, label in enumerate(self.prompt_ids) if label in keep])
        return _replace(out, failures={k: v for k, v in self.failures.items() if k in keep})

    def first(self, n: int) -> Samples:
        """The first n completions of each prompt, in the order sampled."""
        rows = sorted(row for members in self.rows_of().values() for row in members[:n])
        return self.take(rows)

    def split(self, n: int, random_state: int | np.random.Generator | None = None) -> tuple[Samples, Samples]:
        """Two disjoint parts: n random completions of every prompt, and the rest. ValueError where a prompt has fewer than n."""
        rng = np.random.default_rng(random_state)
        chosen: set[int] = set()
        for label, members in self.rows_of().items():
            if len(members) < n:
                raise ValueError(f"prompt {label!r} has {len(members)} completions, fewer than n = {n}")
            chosen.update(int(i) for i in rng.choice(members, size=n, replace=False))
        return self.take(sorted(chosen)), self.take([i for i in range(len(self)) if i not in chosen])

    def parts(self, k: int) -> list[Samples]:
        """k disjoint parts with equally many completions of every prompt, in the order sampled; a remainder is left out."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        rows: list[list[int]] = [[] for _ in range(k)]
        for label, members in self.rows_of().items():
            each = len(members) // k
            if each == 0:
                raise ValueError(f"prompt {label!r} has {len(members)} completions: too few for {k} parts")
            for part in range(k):
                rows[part].extend(members[part * each : (part + 1) * each])
        return [self.take(sorted(part)) for part in rows]

    # -- numbers

    def encode(self, max_length: int | None = None, pad: int = PAD) -> NDArray[np.int32]:
        """int32 [N, max_length]: one code point or token id a column, cut to max_length, padded on the right.

        max_length None means the longest completion (at least 1).
        """
        if max_length is not None and (
            isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1
        ):
            raise ValueError(f"max_length must be an integer of at least 1, got {max_length!r}")
        if pad >= 0:
            raise ValueError(f"pad must be negative, outside every alphabet; got {pad}")
        length = max_length or max((len(c) for c in self.completions), default=0) or 1
        if 4 * length * len(self) > _MOST_BYTES:
            raise ValueError(
                f"{len(self)} completions of length {length} need {4e-9 * length * len(self):.0f} GB: pass a smaller max_length"
            )
        out = np.full((len(self), length), pad, dtype=np.int32)
        for row, completion in zip(out, self.completions, strict=True):
            head = completion[:length]
            row[: len(head)] = _codes(head)
        return out

    def share_longer_than(self, max_length: int | None) -> float:
        """Share of completions that a cut at max_length shortens."""
        if max_length is None or not len(self):
            return 0.0
        return sum(len(c) > max_length for c in self.completions) / len(self)

    def fingerprint(self) -> str:
        """sha256 over the level and all (prompt, completion) rows in order: equal for equal samples."""
        digest = hashlib.sha256(repr(self.level).encode())
        for label, completion in zip(self.prompt_ids, self.completions, strict=True):
            digest.update(_row_bytes(label, completion))
        return digest.hexdigest()

    def digests(self) -> dict[str, list[str]]:
        """Running hash of each prompt's completions: entry n - 1 stands for the first n. Tells a grown sample from another one."""
        out: dict[str, list[str]] = {}
        for label, members in self.rows_of().items():
            digest = hashlib.sha256(repr((self.level, label)).encode())
            chain = []
            for row in members:
                digest.update(_row_bytes(label, self.completions[row]))
                chain.append(digest.hexdigest()[:16])
            out[repr(label)] = chain
        return out


def completion_fields(completion: Any) -> dict[str, Any]:
    """The fields that bring a completion back exactly.

    Text with lone surrogates also gets `codepoints`: JSON would read two of them in a row as one character.
    """
    if not isinstance(completion, str):
        return {"token_ids": [int(t) for t in completion]}
    if any("\ud800" <= char <= "\udfff" for char in completion):
        readable = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in completion)
        return {"completion": readable, "codepoints": [ord(c) for c in completion]}
    return {"completion": completion}


def _completion_of(row: Mapping[str, Any], level: Level | None, where: str) -> Any:
    if level == "token" or ("token_ids" in row and "completion" not in row):
        ids = row.get("token_ids")
        if isinstance(ids, str):
            raise TypeError(f"{where}: token_ids must be a list of integers, got a text")
        return ids
    if row.get("codepoints") is not None:
        try:
            return "".join(map(chr, row["codepoints"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: codepoints must be a list of Unicode code points: {error}") from None
    text = row.get("completion")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{where}: completion must be a text, got {type(text).__name__}; token ids go in 'token_ids'")
    return text


def _count(row: Mapping[str, Any], name: str, where: str) -> int:
    """A count that may be missing."""
    value = row.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {name} must be a number of at least 0, got {value!r}")
    return int(value)


def _read_jsonl(path: Path, torn: list[int]) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        pending: tuple[int, Exception] | None = None
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if pending is not None:
                raise ValueError(f"{path}, line {pending[0]}: not JSON: {pending[1]}")
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
                pending = (number, error)
                continue
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object is needed, got {type(row).__name__}")
            yield row
        if pending is not None:
            torn.append(pending[0])


def _checked(completion: Any, row: int, level: Level) -> Any:
    if level == "char":
        if not isinstance(completion, str):
            kind = type(completion).__name__
            hint = {"bytes": ": decode it first", "NoneType": ": a failed request belongs in `failures`"}.get(kind, "")
            raise TypeError(f"completions[{row}] must be a str like the others (level 'char'), got {kind}{hint}")
        return completion
    if isinstance(completion, (str, bytes, bytearray)) or completion is None:
        raise TypeError(
            f"completions[{row}] must be a sequence of token ids like the others (level 'token'), "
            f"got {type(completion).__name__}"
        )
    try:
        array = np.asarray(completion)
    except Exception:
        array = np.asarray(None)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise TypeError(f"completions[{row}] must be a flat sequence of integers, got {type(completion).__name__}")
    ids = tuple(int(t) for t in array.ravel()) if array.size else ()
    if ids and (min(ids) < 0 or max(ids) >= 2**31):
        raise ValueError(
            f"completions[{row}] has a token id outside [0, 2**31): {min(ids) if min(ids) < 0 else max(ids)}"
        )
    return ids


def _codes(completion: Any) -> Any:
    if isinstance(completion, str):
        return np.frombuffer(completion.encode("utf-32-le", "surrogatepass"), dtype="<i4")
    return completion


def _row_bytes(label: PromptId, completion: Any) -> bytes:
    text = completion if isinstance(completion, str) else ",".join(map(str, completion))
    body = f"{label!r}\x1f".encode("utf-8", "surrogatepass") + text.encode("utf-8", "surrogatepass")
    return len(body).to_bytes(8, "little") + body


def _replace(samples: Samples, **changes: Any) -> Samples:
    fields = {
        "prompt_ids": samples.prompt_ids,
        "completions": samples.completions,
        "level": samples.level,
        "design": samples.design,
        "failures": samples.failures,
        "meta": samples.meta,
    }
    return Samples(**{**fields, **changes})


def surely_same(x: Samples, y: Samples) -> bool:
    """Whether y is x again: the same rows in the same order, and too varied for that to be chance (below one in a million)."""
    if not len(x) or x.prompt_ids != y.prompt_ids or x.completions != y.completions:
        return False
    chance = 0.0
    for members in x.rows_of().values():
        seen = Counter(x.completions[i] for i in members)
        chance += sum(k * math.log(k / len(members)) for k in seen.values())
    return chance < math.log(1e-6)
