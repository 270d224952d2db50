"""mAP and nDCG on matrices up to the size of EPIC-KITCHENS-100's test set, against the formulas as full float64 arrays."""

import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np

from chapbook_shared.bench import Comparison, compare, main
from egovideo import mir


def obvious(similarity: np.ndarray, relevancy: np.ndarray) -> list[float]:
    """Both metrics by whole-matrix NumPy, each with its own stable sort, as copies of the official file do."""
    out = []
    for sim, rel in ((similarity, relevancy), (similarity.T, relevancy.T)):
        ranked = np.take_along_axis(rel, np.argsort(-sim, axis=1, kind="stable"), 1)
        found = np.cumsum(ranked, axis=1)
        found[ranked != 1] = 0
        out.append(float(((found / np.arange(1, rel.shape[1] + 1)).sum(1) / (rel == 1).sum(1)).mean()))
        ranked = np.take_along_axis(rel, np.argsort(-sim, axis=1, kind="stable"), 1)
        ideal = -np.sort(-rel, axis=1)
        first = np.arange(rel.shape[1]) < (rel > 0).sum(1)[:, None]
        discount = 1 / np.log2(np.arange(2, rel.shape[1] + 2))
        out.append(float(((ranked * first) @ discount / (ideal @ discount)).mean()))
    return out


def run() -> Iterator[Comparison]:
    rng = np.random.default_rng(0)
    for videos, texts in ((500, 200), (2000, 800), (9668, 3842)):
        similarity = rng.normal(size=(videos, texts)).astype(np.float32)
        relevancy = rng.choice(np.float32([0, 0.25, 0.5, 1]), p=[0.7, 0.15, 0.147, 0.003], size=similarity.shape)
        relevancy[np.arange(videos), rng.integers(texts, size=videos)] = 1
        relevancy[rng.integers(videos, size=texts), np.arange(texts)] = 1
        full = videos == 9668
        tracemalloc.start()
        got = mir(similarity, relevancy)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        wanted = obvious(similarity, relevancy)
        assert np.allclose(
            [got["mAP"]["v2t"], got["nDCG"]["v2t"], got["mAP"]["t2v"], got["nDCG"]["t2v"]], wanted, atol=1e-5
        )
        print(f"{videos} x {texts}: {peak:.0f} MB above the inputs", file=sys.stderr)
        yield compare(
            f"mAP and nDCG, both ways, {videos} x {texts}",
            lambda s=similarity, r=relevancy: mir(s, r),
            lambda s=similarity, r=relevancy: obvious(s, r),
            peer_name="whole-matrix NumPy",
            repeats=1 if full else 5,
            warmup=0 if full else 1,
            goal=1.0,
        )
        if full:
            yield compare(
                "mAP and nDCG, both ways, 9668 x 3842",
                lambda s=similarity, r=relevancy: mir(s, r),
                goal=5000,
                repeats=3,
            )


if __name__ == "__main__":
    main(run)
