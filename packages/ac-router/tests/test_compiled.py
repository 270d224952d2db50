"""`torch.compile(fullgraph=True)` of everything on the way from tokens to experts equals eager."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")


OURS = ["feature_weights", "ACRouter", "ACMoE", "ACSoftMoE"]


def run(backend: str, how_much: str) -> list[str]:
    script = Path(__file__).parent / "run_compiled.py"
    command = [sys.executable, str(script), backend, how_much]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_it_is_one_graph_that_equals_eager():
    # The backend "eager" runs the traced graph as it is: whether there is one is what is quick to know.
    assert run("eager", "few") == [*OURS, "MixtralForCausalLM"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_generated_code_equals_eager(backend):
    families = ["MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
    assert run(backend, "all") == [*OURS, *families]
