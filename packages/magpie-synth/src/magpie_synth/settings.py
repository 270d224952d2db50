"""What fixes the meaning of a row: the schedule, the settings of both steps, and the row's own key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chapbook_shared.lm import Sampling
from chapbook_shared.validate import check_int, check_positive

from .completing import row_seed
from .domains import DOMAINS, FOLLOW_UP, LANGUAGES

Schedule = Sequence[tuple[float, float, int]]

AIR: Schedule = tuple((t, p, 300_000) for t in (1.0, 1.1, 1.2) for p in (1.0, 0.995, 0.990)) + tuple(
    (1.25, p, 100_000) for p in (1.0, 0.995, 0.990)
)
"""The 3M rows of Magpie-Air: (temperature, top_p, rows)."""
PRO: Schedule = ((1.0, 1.0, 300_000), (1.1, 0.995, 300_000), (1.2, 0.995, 300_000), (1.25, 0.990, 100_000))
"""The 1M rows of Magpie-Pro."""


@dataclass(frozen=True, kw_only=True)
class InstructionSettings:
    """How instructions are drawn and cleaned. Temperature and top_p are the schedule's."""

    max_tokens: int = 2048
    stop_at_newline: bool = False
    """The official default is on; it truncates lists, code and tables."""
    stop: tuple[str, ...] = ()
    """Further stop strings."""
    suppress_first: tuple[str, ...] = ()
    """Beginnings of tokens that may not come first, such as "#"."""
    first_token_temperature: float = 1.0
    """What the temperature of the first token is multiplied by (official switch: 1.2)."""
    sanitize: bool = False
    """Take list numbers and answers off; needed for Gemma 2 and Llama 3.1 and later."""
    follow_up_system: str = FOLLOW_UP
    """The system text of the prompt for turns after the first."""

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, minimum=1)
        check_positive("first_token_temperature", self.first_token_temperature)


@dataclass(frozen=True, kw_only=True)
class ResponseSettings:
    """How responses are drawn. The paper's are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    max_tokens: int = 4096
    system_in_response: bool = False
    """Also put the row's system text into the prompt for the response."""

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> Sampling:
        """As the model takes it; raises ValueError for what it cannot mean."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True)
class RowKey:
    """(run seed, cell of the schedule, index): all that a row's random numbers depend on."""

    seed: int
    cell: int
    index: int

    @property
    def id(self) -> str:
        """Sorts by index, then cell: rows that a longer schedule adds come after those that are there."""
        return f"{self.seed}-{self.index:08d}-{self.cell:02d}"

    @classmethod
    def parse(cls, id: str) -> RowKey:
        """The key of an id."""
        seed, index, cell = id.rsplit("-", 2)
        return cls(int(seed), int(cell), int(index))


def row_keys(seed: int, schedule: Schedule) -> list[RowKey]:
    """All rows of a schedule, in the order of their ids."""
    keys = [RowKey(seed, cell, index) for cell, (_, _, rows) in enumerate(schedule) for index in range(rows)]
    return sorted(keys, key=lambda key: (key.index, key.cell))


def check_schedule(schedule: Sequence[Sequence[float]]) -> tuple[tuple[float, float, int], ...]:
    """The schedule as tuples; raises ValueError for what is not (temperature, top_p, rows)."""
    if not schedule:
        raise ValueError("schedule must hold at least one (temperature, top_p, rows), got none")
    cells = []
    for cell in schedule:
        if len(cell) != 3:
            raise ValueError(f"schedule must hold (temperature, top_p, rows), got {cell!r}")
        temperature, top_p, rows = cell
        Sampling(temperature=temperature, top_p=top_p)
        check_int("rows", rows, minimum=1)
        cells.append((float(temperature), float(top_p), int(rows)))
    return tuple(cells)


class SystemMix:
    """One system text or several with weights; each row draws its own. Weights need not sum to 1."""

    def __init__(self, systems: Mapping[str, str | tuple[str, float]]) -> None:
        if not systems:
            raise ValueError("systems must name at least one system text, got none")
        self.texts = {key: value if isinstance(value, str) else value[0] for key, value in systems.items()}
        self.weights = {key: 1.0 if isinstance(value, str) else float(value[1]) for key, value in systems.items()}
        for key, weight in self.weights.items():
            check_positive(f"the weight of systems[{key!r}]", weight)

    @classmethod
    def of(
        cls,
        system: str,
        systems: Mapping[str, str | tuple[str, float]] | None,
        language: str | None,
    ) -> SystemMix:
        """What the three arguments of `Magpie` mean; at most one of them is set."""
        if (system != "template") + (systems is not None) + (language is not None) > 1:
            raise ValueError(
                "give one of system, systems and language, not several: put the language into the system texts"
            )
        if language is not None:
            if language not in LANGUAGES:
                raise ValueError(
                    f"language must be one of {', '.join(LANGUAGES)}, got {language!r}: or pass system= with a text in it"
                )
            return cls({language: LANGUAGES[language]})
        if systems is not None:
            return cls(systems)
        return cls({system: DOMAINS[system]} if system in DOMAINS else {"": system})

    def choose(self, key: RowKey) -> str:
        """The key of a row's system text."""
        if len(self.texts) == 1:
            return next(iter(self.texts))
        point = row_seed(key.seed, "system", key.cell, key.index) / 2**53 * sum(self.weights.values())
        for name, weight in self.weights.items():
            point -= weight
            if point < 0:
                return name
        return name  # rounding
