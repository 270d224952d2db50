import numpy as np
import pytest

from mmd_equality import Samples


@pytest.fixture
def source():
    """Samples of independent positions with given symbol probabilities: n completions of each of m prompts."""

    def draw(n, *, m=1, length=8, symbols=4, shift=0.0, seed=0, tables=7):
        table_rng, rng = np.random.default_rng(tables), np.random.default_rng(seed)
        probabilities = table_rng.dirichlet(np.full(symbols, 0.4), size=(m, length))
        if shift:
            probabilities = (1 - shift) * probabilities + shift * np.roll(probabilities, 1, axis=2)
        uniform = rng.random((m, n, length, 1))
        rows = (uniform > np.cumsum(probabilities, axis=2)[:, None]).sum(axis=3).clip(max=symbols - 1)
        return Samples(np.repeat(np.arange(m), n).tolist(), rows.reshape(m * n, length).tolist())

    return draw
