"""The packaged samples of a real model, and (slow) that the pipeline still gives them."""

import sys
from pathlib import Path

import pytest

from chapbook_shared.progress import Progress
from mmd_equality import two_sample_test
from mmd_equality.demo import LABELS, demo, evidence

EVIDENCE = Path(__file__).parents[1] / "evidence"


def test_the_packaged_samples_are_whole():
    bags = evidence()
    assert set(bags) == {"reference", *LABELS}
    for name, bag in bags.items():
        assert bag.failure_rate == 0, name
        assert len(bag.counts) == 6
        assert set(bag.counts.values()) == {
            80 if name in ("reference", "llama_cpp", "openvino_gguf", "openvino_ir") else 40
        }


def test_a_second_seed_is_not_rejected_and_a_lower_temperature_is():
    bags = evidence()
    reference = bags["reference"].first(40)
    assert two_sample_test(reference, bags["second_seed"], n_permutations=999, random_state=0).pvalue > 0.01
    assert two_sample_test(reference, bags["temperature_0.7"], n_permutations=999, random_state=0).pvalue <= 0.01


@pytest.mark.slow
def test_the_pipeline_gives_the_packaged_samples(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EVIDENCE))
    import sample_smollm2

    try:
        sample_smollm2.draw("reference", tmp_path, per_prompt=1)
    finally:
        sys.modules.pop("sample_smollm2")
    from mmd_equality import Samples

    drawn, packed = Samples.from_jsonl(tmp_path / "reference.jsonl"), evidence()["reference"].first(2)
    same = sum(a == b for a, b in zip(drawn.completions, packed.completions, strict=True))
    assert same >= 11  # of 12: a draw within rounding of a border may go either way in another batch


@pytest.mark.slow
def test_the_demo_makes_its_report():
    report = demo(seed=0, progress=Progress(enabled=False))
    assert len(report.to_dict()["claims"]) >= 5
