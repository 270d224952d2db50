"""The evidence run in very small: it can be killed, resumed and told, whatever its claims about the model come to."""

import pytest

from chapbook_shared.lm import LocalModel, OpenVINOModel
from chapbook_shared.progress import Progress
from magpie_synth.demo import Sizes, evidence, small_model


def test_without_the_conversion_the_model_runs_in_transformers(monkeypatch):
    def fails(**_):
        raise FileNotFoundError("uv is needed to convert the model")

    monkeypatch.setattr(OpenVINOModel, "smollm2", fails)
    assert isinstance(small_model(), LocalModel)


@pytest.mark.slow
def test_nothing_is_lost_and_every_claim_is_told(tmp_path):
    sizes = Sizes(rows=12, responses=2, instruction_tokens=32, response_tokens=8)
    report = evidence(tmp_path / "run", sizes, seed=1, progress=Progress(enabled=False), conclusive=False)
    assert len(report.claims) == 5
    assert report.claims[0].status == "holds"
    assert report.tables[0].title == "Prompts"
    assert len(report.figures) == 2
