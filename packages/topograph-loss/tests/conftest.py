import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def reference():
    """The slow, obvious implementation that the benchmarks time as well."""
    spec = importlib.util.spec_from_file_location(
        "thickened_reference", HERE.parent / "benchmarks/thickened_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden():
    """Values by brute force in float64 (5x and 7x upsampling, box dilation, scipy labelling; 3D: gudhi) and, for the multi-class
    gradients, by the official implementation."""
    expected = json.loads((HERE / "data/expected.json").read_text(encoding="utf-8"))
    arrays = {path.stem: dict(np.load(path)) for path in (HERE / "data").glob("*.npz")}
    return expected, arrays


@pytest.fixture(scope="session")
def vessels():
    """Two smooth random pairs (pred, target) with gaps, bridges and holes: 96 x 96, about 10 % wrong."""
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(5)
    field, noise = (gaussian_filter(rng.normal(size=(2, 96, 96)), (0, s, s)) for s in (4, 1.5))
    field, noise = field / field.std(), noise / noise.std()
    return field + 0.4 * noise > 0.4, field > 0.4
