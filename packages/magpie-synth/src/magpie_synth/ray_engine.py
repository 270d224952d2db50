"""Many machines: a model that is a pool of Ray Data workers.

Each worker is an actor that builds the model once, with whatever `factory` says, on its own machine; blocks of rows go to whichever
is free, and a block whose worker dies is given to another. Finished blocks come back to the process that runs `Magpie`, which is
the only one that writes: no two machines ever write one file, no shared file system is needed, and a run that is killed goes on
with the rows that its store lacks, on however many workers there are then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from chapbook_shared.lm import Capabilities, Completion, Sampling, Usage
from chapbook_shared.lm.protocol import Prompt
from chapbook_shared.validate import check_int, import_extra

from .completing import Completer

Factory = Callable[[], Completer]


class RayModel:
    """Completions from `workers` copies of a model.

    Args:
        factory: builds the model on a worker: any picklable callable, such as `OpenVINOModel.smollm2`.
        workers: how many copies.
        block: rows that a worker takes at a time; what a worker has under way is lost with it and done again.
        wave: rows planned at a time.
        gpus, cpus: of each worker.

    Connects to the running cluster (`RAY_ADDRESS`), or starts Ray on this machine.
    """

    def __init__(
        self,
        factory: Factory,
        *,
        workers: int = 1,
        block: int = 64,
        wave: int = 100_000,
        gpus: float = 0,
        cpus: float = 1,
    ) -> None:
        for name, value in (("workers", workers), ("block", block), ("wave", wave)):
            check_int(name, value, minimum=1)
        self._ray: Any = import_extra("ray", "magpie-synth[ray]")
        self._data: Any = import_extra("ray.data", "magpie-synth[ray]")
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        self._factory, self._workers, self._block, self.wave = factory, workers, block, wave
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        describe = self._ray.remote(**self._resources)(_describe)
        self.name, self.capabilities = self._ray.get(describe.remote(factory))

    def complete_each(self, requests: Iterable[tuple[Prompt, Sampling]]) -> Iterator[tuple[int, list[Completion]]]:
        """As `LanguageModel.complete_each`; rows come back a block at a time."""
        numbered = enumerate(requests)
        while wave := list(islice(numbered, self.wave)):
            yield from self._wave_of(wave)

    def complete_many(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[list[Completion]]:
        """The completions of each prompt, in order."""
        answers = dict(self.complete_each(zip(prompts, sampling, strict=True)))
        return [answers[place] for place in range(len(prompts))]

    def close(self) -> None:
        """Nothing to let go of: Ray ends its workers with the process, or when the cluster is shut down."""

    def _wave_of(self, wave: list[tuple[int, tuple[Prompt, Sampling]]]) -> Iterator[tuple[int, list[Completion]]]:
        # One worker may not get all: at least a block for each.
        size = max(1, min(self._block, -(-len(wave) // self._workers)))
        blocks = [
            {"rows": json.dumps([_request_to_json(*row) for row in wave[start : start + size]])}
            for start in range(0, len(wave), size)
        ]
        context = self._data.DataContext.get_current()
        context.enable_progress_bars = False
        answers = self._data.from_items(blocks, override_num_blocks=len(blocks)).map(
            _Worker,
            fn_constructor_args=(self._factory,),
            compute=self._data.ActorPoolStrategy(size=min(self._workers, len(blocks))),
            **self._resources,
        )
        for answer in answers.iter_rows():
            for place, completions in json.loads(answer["rows"]):
                yield place, [_completion_from_json(completion) for completion in completions]


class _Worker:
    """One copy of the model, on a machine of the cluster."""

    def __init__(self, factory: Factory) -> None:
        self.model = factory()

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        rows = [_request_from_json(row) for row in json.loads(block["rows"])]
        done = [
            (rows[place][0], [_completion_to_json(completion) for completion in completions])
            for place, completions in self.model.complete_each((prompt, sampling) for _, prompt, sampling in rows)
        ]
        return {"rows": json.dumps(done)}


def _describe(factory: Factory) -> tuple[str, Capabilities]:
    model = factory()
    return model.name, model.capabilities


def _request_to_json(place: int, request: tuple[Prompt, Sampling]) -> list[Any]:
    prompt, sampling = request
    return [place, prompt if isinstance(prompt, str) else list(prompt), asdict(sampling)]


def _request_from_json(row: list[Any]) -> tuple[int, Prompt, Sampling]:
    place, prompt, values = row
    values |= {name: tuple(values[name]) for name in ("stop", "stop_token_ids")}
    values["logit_bias"] = tuple((int(id), float(bias)) for id, bias in values["logit_bias"])
    return place, prompt, Sampling(**values)


def _completion_to_json(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "model": completion.model,
        "usage": None if usage is None else [usage.prompt_tokens, usage.completion_tokens],
        "token_ids": completion.token_ids,
        "details": {name: value for name, value in completion.details.items() if isinstance(value, str | int | float)},
    }


def _completion_from_json(values: dict[str, Any]) -> Completion:
    ids, usage = values["token_ids"], values["usage"]
    return Completion(
        text=values["text"],
        finish_reason=values["finish_reason"],
        model=values["model"],
        usage=None if usage is None else Usage(*usage),
        token_ids=None if ids is None else tuple(ids),
        details=values["details"],
    )
