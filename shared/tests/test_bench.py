import json
import subprocess
import sys
import time

import numpy as np
import pytest

from chapbook_shared.bench import Comparison, compare, main

SCRIPT = '''
"""Two rows."""
from chapbook_shared.bench import Comparison, main

def run():
    yield Comparison("fast", 1.0, 3.0, "peer", 3.0, goal=2.0)
    yield Comparison("size", 5.0, goal=4.0, unit="MB")

if __name__ == "__main__":
    main(run)
'''


def test_both_are_run_in_turns_after_the_warm_up():
    calls = []
    row = compare("w", lambda: calls.append("ours"), lambda: calls.append("peer"), peer_name="p", repeats=2, warmup=1)
    assert calls == ["ours", "peer"] * 3
    assert row.ratio == pytest.approx(row.peer / row.ours)


def test_the_ratio_says_how_often_ours_fits_into_the_peer():
    row = compare("w", lambda: time.sleep(0.002), lambda: time.sleep(0.02), repeats=3, goal=2.0)
    assert row.ratio > 2
    assert row.met is True


def test_a_goal_without_a_peer_is_a_limit():
    assert Comparison("w", 5.0, goal=4.0).met is False
    assert Comparison("w", 3.0, goal=4.0).met is True
    assert Comparison("w", 3.0).met is None
    assert Comparison("w", 3.0, 1.5, "p", 0.5, goal=1.0).met is False
    assert compare("w", lambda: None, goal=1e6).met is True


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_script_prints_a_table_or_json_lines(tmp_path, flags):
    script = tmp_path / "bench_two.py"
    script.write_text(SCRIPT, encoding="utf-8")
    out = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, check=True).stdout
    if flags:
        assert [(row["workload"], row["met"]) for row in map(json.loads, out.splitlines())] == [
            ("fast", True),
            ("size", False),
        ]
    else:
        assert "fast" in out
        assert "<= 4 MB" in out


def test_whether_a_goal_is_met_can_be_written_as_json():
    met = Comparison("w", np.float64(1), np.float64(2), "p", np.float64(2), 1.5).met
    assert json.dumps(met) == "true"


def test_names_are_printed_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench"])
    main(lambda: [Comparison("[/b] batch [n] a:b:c", 1.0)])
    assert "[/b] batch [n] a:b:c" in capsys.readouterr().out


def test_no_repeats_measure_nothing():
    with pytest.raises(ValueError, match="repeats must be >= 1"):
        compare("w", lambda: None, repeats=0)
