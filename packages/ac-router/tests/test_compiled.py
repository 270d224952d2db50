"""`torch.compile(fullgraph=True)` of everything on the way from tokens to experts equals eager."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def run(backend: str) -> None:
    script = Path(__file__).parent / "run_compiled.py"
    done = subprocess.run(
        [sys.executable, str(script), backend], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [
        "feature_weights",
        "ACRouter",
        "ACMoE",
        "ACSoftMoE",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
    ]


def test_everything_is_one_graph_that_equals_eager():
    run("aot_eager")


@pytest.mark.slow
def test_generated_code_equals_eager():
    run("inductor")
