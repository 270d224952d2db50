"""What the demo works on: real tools whose documentation was stripped, requests written by hand, and rules in the place of models.

Scripted are the Explorer, the Analyzer, the Rewriter (`scripted_roles`) and the agent that reads the documents (`DocReader`). The tools,
their errors, the calls, the loop, the gate and the adapters are real.
"""

from __future__ import annotations

import calendar
import datetime
import json
import re
import sqlite3
import textwrap
import threading
import zoneinfo
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from chapbook_shared.lm import Message, Sampling
from draft_docs.sources.base import ToolSource
from draft_docs.tools import ToolResult, ToolSpec

# Tools: functions of the standard library behind thin signatures, a table, a web API.


def month_days(year: int, month: int) -> int:
    if not 1 <= month <= 12:
        raise ValueError(f"month must be between 1 and 12, got {month}")
    return calendar.monthrange(year, month)[1]


def weekday(date: str) -> str:
    try:
        return datetime.date.fromisoformat(date).strftime("%A")
    except ValueError:
        raise ValueError(f"expected a date as YYYY-MM-DD, got {date!r}") from None


def minutes_between(start: str, end: str) -> int:
    moments = []
    for name, time in (("start", start), ("end", end)):
        if not re.fullmatch(r"[0-2]\d:[0-5]\d", time):
            raise ValueError(f"{name}: expected a time as HH:MM, got {time!r}")
        moments.append(int(time[:2]) * 60 + int(time[3:]))
    return moments[1] - moments[0]


def zone_offset(zone: str) -> str:
    try:
        offset = zoneinfo.ZoneInfo(zone).utcoffset(datetime.datetime(2024, 1, 1))
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{zone!r} is no IANA time zone") from None
    return str(offset)


def convert_length(value: float, unit: str) -> float:
    factors = {"m": 3.28084, "ft": 0.3048, "km": 0.621371}
    if unit not in factors:
        raise ValueError(f"unit must be one of {', '.join(factors)}, got {unit!r}")
    return value * factors[unit]


def shorten(text: str, width: int) -> str:
    if not 8 <= width <= 80:
        raise ValueError(f"width must be between 8 and 80, got {width}")
    return textwrap.shorten(text, width, placeholder="...")


def grade(percent: int) -> str:
    """The liar: what its error says is not what it checks."""
    if not 1 <= percent <= 10:
        raise ValueError(f"percent must be between 0 and 100, got {percent}")
    return "ABCDEFGHIJ"[10 - percent]


_TABLE = sqlite3.connect(":memory:", check_same_thread=False)
_TABLE.executescript(
    "create table stock (item text, shelf text, amount integer);"
    "insert into stock values ('bolt', 'A', 12), ('nut', 'A', 3), ('gear', 'B', 40), ('belt', 'C', 7);"
)
_TABLE_LOCK = threading.Lock()


def sorted_stock(column: str) -> list[list[Any]]:
    columns = ["item", "shelf", "amount"]
    if column not in columns:
        raise ValueError(f"column must be one of {', '.join(columns)}, got {column!r}")
    with _TABLE_LOCK:
        return [list(row) for row in _TABLE.execute(f"select * from stock order by {column}")]


FUNCTIONS: list[Callable[..., Any]] = [
    month_days,
    weekday,
    minutes_between,
    zone_offset,
    convert_length,
    shorten,
    grade,
    sorted_stock,
]

_RATES = {"EUR": 1.0, "USD": 1.1, "JPY": 160.0, "GBP": 0.85}


class Api(BaseHTTPRequestHandler):
    """A small web API: exchange rates, books, parcels."""

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        status, body = self.answer(parts.path, query)
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[int, Any]:
        if path == "/rate":
            for name in ("base", "quote"):
                if query.get(name) not in _RATES:
                    return 422, {"error": f"{name}: expected a three-letter ISO 4217 code, got {query.get(name)!r}"}
            return 200, {"rate": _RATES[query["quote"]] / _RATES[query["base"]]}
        if path == "/books":
            if query.get("order") not in ("asc", "desc"):
                return 422, {"error": f"order must be one of asc, desc, got {query.get('order')!r}"}
            if not 1 <= int(query.get("limit", "1")) <= 50:
                return 422, {"error": f"limit must be between 1 and 50, got {query['limit']}"}
            return 200, {"books": ["Ulysses", "Emma"][: int(query.get("limit", "1"))]}
        parcel = path.removeprefix("/parcels/")
        if not re.fullmatch(r"PX-\d{6}", parcel):
            return 422, {"error": f"id: expected a number like PX-000000, got {parcel!r}"}
        return 200, {"id": parcel, "state": "on its way"}


def _operation(name: str, path: str, **parameters: str) -> dict[str, Any]:
    listed = [
        {
            "name": parameter,
            "in": "path" if f"{{{parameter}}}" in path else "query",
            "required": True,
            "schema": {"type": kind},
        }
        for parameter, kind in parameters.items()
    ]
    return {path: {"get": {"operationId": name, "parameters": listed, "responses": {"200": {"description": "ok"}}}}}


OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": "Small things", "version": "1"},
    "paths": {
        **_operation("getRate", "/rate", base="string", quote="string"),
        **_operation("listBooks", "/books", order="string", limit="integer"),
        **_operation("getParcel", "/parcels/{id}", id="string"),
    },
}


@contextmanager
def api() -> Iterator[str]:
    """The web API on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def stripped(tool: ToolSpec) -> ToolSpec:
    """The tool with its words taken away; names, types and what is required stay."""
    schema = {
        **tool.input_schema,
        "properties": {
            name: {key: value for key, value in parameter.items() if key != "description"}
            for name, parameter in tool.parameters.items()
        },
    }
    return ToolSpec(tool.name, "", schema, tool.hints, tool.source)


class Joined:
    """Several sources as one, their documentation stripped."""

    def __init__(self, *sources: ToolSource):
        self._owner = {tool.name: source for source in sources for tool in source.tools}
        self.tools = [stripped(tool) for source in sources for tool in source.tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._owner[name].call(name, arguments)

    def rewritten(self, refined: Mapping[str, ToolSpec]) -> str:
        # Four sources in one have no document of their own; the demo reads the refined tools themselves.
        raise NotImplementedError("a demo's tools come from several sources: ask each for its own document")

    async def aclose(self) -> None:
        return


class OtherEvidence(Joined):
    """The control: each tool's calls are answered with what another tool, `shift` places on, returned in the real run."""

    def __init__(self, tools: Sequence[ToolSpec], evidence: Mapping[str, Sequence[ToolResult]], shift: int):
        self.tools = list(tools)
        names = [tool.name for tool in tools]
        self._answers = {name: list(evidence[names[(i + shift) % len(names)]]) for i, name in enumerate(names)}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        answers = self._answers[name]
        return answers.pop(0) if len(answers) > 1 else answers[0]


# Requests, written by hand: the tool, the sentence, and what is meant for each argument, as a person means it. A time is (hour, minute), a
# date (year, month, day); a word is a place, a unit, a currency or a choice; numbers are numbers.

Meaning = Any
REQUESTS: list[tuple[str, str, dict[str, Meaning]]] = [
    *(("get_current_time", f"What time is it in {p} now?", {"timezone": p}) for p in ("Rome", "Tokyo", "Lima", "Oslo", "Cairo", "UTC")),
    *(
        ("convert_time", f"It is {h}:{m:02} in {a}: what time is that in {b}?", {"source_timezone": a, "time": (h, m), "target_timezone": b})
        for a, h, m, b in (("Rome", 14, 30, "Tokyo"), ("Paris", 9, 5, "Lima"), ("UTC", 11, 45, "UTC"), ("Oslo", 23, 0, "Cairo"),
                           ("Madrid", 7, 15, "London"), ("Berlin", 18, 20, "Seoul"))
    ),
    *(("month_days", f"How many days has month {m} of {y}?", {"year": y, "month": m}) for y, m in ((2024, 2), (1999, 12), (2023, 6), (2030, 1), (1900, 2), (2000, 11))),
    *(("weekday", f"Which day of the week was {d}?", {"date": d}) for d in ((2024, 5, 1), (1969, 7, 20), (2000, 2, 29), (1989, 11, 9), (2030, 12, 31), (1912, 6, 23))),
    *(
        ("minutes_between", f"How long is it from {a} until {b}?", {"start": a, "end": b})
        for a, b in (((9, 5), (17, 30)), ((11, 0), (11, 45)), ((0, 10), (23, 50)), ((7, 20), (8, 1)), ((13, 0), (14, 0)), ((22, 5), (22, 6)))
    ),
    *(("zone_offset", f"How far is {p} from UTC?", {"zone": p}) for p in ("Rome", "Tokyo", "Lima", "UTC", "Cairo", "Sydney")),
    *(
        ("convert_length", f"Convert {v} {u}.", {"value": v, "unit": u})
        for v, u in ((3.0, "metres"), (10.0, "feet"), (0.5, "kilometres"), (7.0, "m"), (100.0, "metres"), (2.5, "feet"))
    ),
    *(
        ("shorten", f"Cut this to {w} characters: {t}", {"text": t, "width": w})
        for t, w in (("a short line of text", 12), ("one two three four", 5), ("the whole of it", 200), ("a b c d e f", 8), ("words and words", 3), ("again and again", 100))
    ),
    *(("grade", f"Which grade is {p} percent?", {"percent": p}) for p in (95, 50, 7, 0, 100, 33)),
    *(("sorted_stock", f"List the stock by {c}.", {"column": c}) for c in ("the amount", "item", "items", "shelves", "the shelf", "amounts")),
    *(
        ("getRate", f"How much {b} is one {a}?", {"base": a, "quote": b})
        for a, b in (("euro", "yen"), ("dollar", "euro"), ("pound", "dollar"), ("EUR", "USD"), ("yen", "pound"), ("euro", "dollar"))
    ),
    *(
        ("listBooks", f"Show {n} books, {o}.", {"order": o, "limit": n})
        for o, n in (("ascending", 10), ("descending", 5), ("asc", 20), ("descending", 500), ("ascending", 80), ("desc", 2))
    ),
    *(("getParcel", f"Where is parcel {n}?", {"id": n}) for n in (123, 7, 42424, 999999, 1, 80001)),
]  # fmt: skip

# The scripted roles. They see the prompts that a model would see, and nothing else.

_FACTS = [
    ("allowed values", re.compile(r"(\w+) must be one of ([\w, -]+?), got")),
    ("range", re.compile(r"(\w+) must be between (-?\d+) and (-?\d+)")),
    ("format", re.compile(r"(\w+): expected an? \w+ (?:as|like) ([\w:-]+)")),
    ("format", re.compile(r"()expected an? \w+ as ([\w:-]+)")),
    ("format", re.compile(r"()Expected (HH:MM)")),
    ("code", re.compile(r"(\w+): expected a three-letter ISO 4217 (code)")),
    ("zone", re.compile(r"()(?i:no (?:IANA )?time zone)")),
]
_WORDINGS = {
    "allowed values": ["Allowed values: {0}.", "Must be one of {0}.", "Accepts only {0}."],
    "range": ["From {0} to {1}.", "Must lie between {0} and {1}.", "Smallest value {0}, largest {1}."],
    "format": ["Format {0}.", "Written as {0}.", "Give it in the form {0}."],
    "code": ["A three-letter ISO 4217 code.", "Currency as ISO 4217 letters.", "Use the ISO 4217 code."],
    "zone": ["An IANA time zone name.", "Zone from the IANA database.", "Name of an IANA time zone, with region."],
}
_PROBES: dict[str, list[Any]] = {
    "string": ["abc", "xyz", "qrs"],
    "integer": [12, 5000, -3],
    "number": [2.0, 0.0, -1.5],
}


def scripted_roles(messages: Sequence[Message], sampling: Sampling) -> str:
    """Rules in the place of the three models."""
    system, asked = messages[0].text, messages[-1].text
    record = json.JSONDecoder().raw_decode(asked, asked.index("{"))[0]
    if "find out" in system:
        return _explore(record, asked)
    call = re.search(r"Call (\d+)\n.*?\nArguments: (.*)\n", asked)
    assert call is not None
    arguments = json.loads(call.group(2))
    if "check" in system:
        found = _facts(asked.partition("<data>")[2].partition("</data>")[0], arguments)
        return json.dumps({"suggestions": "\n".join(json.dumps(fact) for fact in found)})
    return _rewrite(record, int(call.group(1)), asked)


def _explore(record: dict[str, Any], asked: str) -> str:
    """Values that the document allows where it says so, probes elsewhere."""
    turn = asked.partition("Arguments tried so far:")[0].count("\n- ")
    arguments = {}
    for name, schema in record["parameters"].get("properties", {}).items():
        learnt = _spelling(schema.get("description", ""))
        if learnt:
            arguments[name] = learnt[turn % len(learnt)]
        else:
            probes = _PROBES.get(schema.get("type", "string"), ["abc"])
            arguments[name] = probes[turn % len(probes)]
    words = " ".join(f"{name[::-1]} {value}" for name, value in arguments.items())
    return json.dumps({"query": f"{'please ' * turn}{words} {turn * 'again '}", "arguments": arguments})


def _spelling(document: str) -> list[Any]:
    """Values of the form that a document states."""
    said = read(document)
    if "allowed" in said:
        return list(said["allowed"])
    if "range" in said:
        low, high = said["range"]
        return [low, high]
    if "pattern" in said:
        return [{"HH:MM": "10:30", "YYYY-MM-DD": "2024-05-01"}.get(said["pattern"], said["pattern"])]
    if "code" in said:
        return ["EUR", "USD"]
    return ["Europe/Rome", "Asia/Tokyo"] if "zone" in said else []


def _facts(result: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an error says, and for which parameter: the one it names, else the one whose value it repeats, else one of a fitting name."""
    for kind, pattern in _FACTS:
        found = pattern.search(result)
        if found is None:
            continue
        named = found.group(1)
        fitting = [name for name in arguments if kind == "zone" and "zone" in name]
        fitting = fitting or [
            name for name in arguments if "time" in name and "zone" not in name and "HH" in found.group()
        ]
        quoted = [name for name, value in arguments.items() if isinstance(value, str) and value in result]
        for_ = [named] if named in arguments else fitting or quoted
        return [{"kind": kind, "parameter": name, "values": list(found.groups()[1:])} for name in for_]
    return []


def _rewrite(record: dict[str, Any], number: int, asked: str) -> str:
    suggestions = asked.partition("Suggestions:\n")[2].partition("\n\n")[0]
    properties = record["parameters"].get("properties", {})
    parameters, facts = {}, []
    for line in suggestions.splitlines():
        if not line.startswith("{"):
            continue
        fact = json.loads(line)
        wordings = _WORDINGS[fact["kind"]]
        sentence = wordings[len(record["name"]) % len(wordings)].format(*fact["values"])
        if fact["parameter"] in properties and sentence not in properties[fact["parameter"]].get("description", ""):
            parameters[fact["parameter"]] = sentence
            facts.append({"claim": f"{fact['parameter']}: {sentence}", "evidence": number})
    needed = ", ".join(record["parameters"].get("required", [])) or "nothing"
    words = " ".join(re.findall(r"[A-Z]?[a-z]+", record["name"])).lower()
    description = record["description"] or f"Tool for: {words}. Needs {needed}."
    if facts:
        description += f" {facts[0]['claim']}"
    return json.dumps(
        {"description": description, "parameters": parameters, "facts": facts, "next_direction": "other arguments"}
    )


# The agent under test: it fills in arguments as a person would say them, unless the document says how they are written.

_CURRENCIES = {"euro": "EUR", "dollar": "USD", "yen": "JPY", "pound": "GBP"}


def read(document: str) -> dict[str, Any]:
    """What a document says about a value, by generic patterns."""
    said: dict[str, Any] = {}
    allowed = re.search(r"(?i)(?:allowed values:|one of|accepts only) ([\w-]+(?:, [\w-]+)+)", document)
    if allowed:
        said["allowed"] = allowed.group(1).split(", ")
    bounds = re.search(r"(?i)(?:from|between|smallest value) (-?\d+)(?:,? (?:to|and|largest)) (-?\d+)", document)
    if bounds:
        said["range"] = (int(bounds.group(1)), int(bounds.group(2)))
    pattern = re.search(r"(?i)(?:format|written as|form) ([\w:-]*[\dMD][\w:-]*)", document)
    if pattern:
        said["pattern"] = pattern.group(1)
    if "4217" in document:
        said["code"] = True
    if "IANA" in document:
        said["zone"] = True
    return said


class DocReader:
    """Chooses the arguments of a call from a request and a tool's document, by fixed rules."""

    def arguments(self, tool: ToolSpec, meant: Mapping[str, Meaning]) -> dict[str, Any]:
        return {name: self.spell(tool, name, value) for name, value in meant.items()}

    def spell(self, tool: ToolSpec, name: str, value: Meaning) -> Any:
        said = read(tool.parameter_docs.get(name, ""))
        if isinstance(value, tuple) and len(value) == 2:
            hour, minute = value
            return (
                f"{hour:02}:{minute:02}"
                if said.get("pattern") == "HH:MM"
                else f"{(hour + 11) % 12 + 1}:{minute:02} {'am' if hour < 12 else 'pm'}"
            )
        if isinstance(value, tuple):
            date = datetime.date(*value)
            return date.isoformat() if said.get("pattern") == "YYYY-MM-DD" else f"{date:%B} {date.day}, {date.year}"
        if isinstance(value, int | float):
            if "range" in said:
                value = min(max(value, said["range"][0]), said["range"][1])
            if tool.parameters[name].get("type") != "string":
                return value
            blank = re.fullmatch(r"(.*?)(0+)", said.get("pattern", ""))
            return f"{blank.group(1)}{value:0{len(blank.group(2))}}" if blank else str(value)
        return self._word(str(value), said)

    def _word(self, word: str, said: Mapping[str, Any]) -> str:
        if "allowed" in said:
            last = word.split()[-1]
            fitting = [choice for choice in said["allowed"] if _short_for(choice, last)]
            return str(max(fitting, key=len)) if fitting else word
        if "code" in said:
            return _CURRENCIES.get(word, word)
        if "zone" in said:
            return next((zone for zone in sorted(zoneinfo.available_timezones()) if zone.endswith(f"/{word}")), word)
        return word


def _short_for(short: str, word: str) -> bool:
    """Whether the letters of `short` come in `word` in this order, the first of both being the same ("ft": "feet")."""
    letters = iter(word)
    return short[0] == word[0] and all(letter in letters for letter in short)
