"""`chapbook bench`: rows collected, crashes reported."""

from textwrap import dedent

import pytest

MET = """
    from chapbook_shared.bench import Comparison, main

    def run():
        yield Comparison("small", 1.0, 3.0, "theirs", 3.0, goal=2.0)
        yield Comparison("large", 1.0, 1.5, "theirs", 1.5, goal=2.0)
        yield Comparison("memory", 10.0, goal=20.0, unit="MB")

    if __name__ == "__main__":
        main(run)
"""
CRASHING = """
    from chapbook_shared.bench import Comparison, main

    def run():
        yield Comparison("before the crash", 1.0)
        raise RuntimeError("no luck")

    if __name__ == "__main__":
        main(run)
"""


@pytest.fixture
def bench(chapbook, workspace):
    folder = workspace.find("demo-pkg").folder / "benchmarks"
    for script in folder.iterdir():
        script.unlink()

    def run(*arguments, **scripts):
        for name, text in scripts.items():
            (folder / f"bench_{name}.py").write_text(dedent(text), encoding="utf-8")
        return chapbook("bench", *arguments, cwd=workspace.root)

    return run


def test_rows_of_all_scripts_are_collected(bench):
    done = bench("demo-pkg", "--json", a=MET, b=MET)
    assert done.code == 0, done.err
    assert [(found["package"], found["script"]) for found in done.json] == [
        ("demo-pkg", "bench_a.py"),
        ("demo-pkg", "bench_b.py"),
    ]
    assert [(row["workload"], row["ratio"], row["goal"], row["met"]) for row in done.json[0]["rows"]] == [
        ("small", 3.0, 2.0, True),
        ("large", 1.5, 2.0, False),
        ("memory", None, 20.0, True),
    ]


def test_the_table_says_met_or_not(bench):
    out = bench("demo-pkg", a=MET).out
    assert "small" in out
    assert ">= 2" in out
    assert "<= 20 MB" in out
    assert "yes" in out
    assert "no" in out


def test_a_crash_is_exit_1_and_the_rest_go_on(bench):
    done = bench("demo-pkg", "--json", a=CRASHING, b=MET)
    assert done.code == 1
    first, second = done.json
    assert first["error"] == "ended with exit status 1"
    assert [row["workload"] for row in first["rows"]] == ["before the crash"]
    assert second["error"] is None
    assert "RuntimeError: no luck" in done.err
    assert "demo-pkg: bench_a.py ended with exit status 1" in done.err


@pytest.mark.parametrize(
    ("script", "error"),
    [("print('hello')", "printed something else than rows"), ("", "printed no row")],
)
def test_a_script_that_does_not_keep_to_the_form_is_reported(bench, script, error):
    done = bench("demo-pkg", "--json", a=script)
    assert done.code == 1
    assert error in done.json[0]["error"]


def test_a_package_without_benchmarks_is_wrong_use(bench):
    done = bench("demo-pkg")
    assert done.code == 2
    assert "demo-pkg has no benchmarks" in done.err


def test_an_unknown_name_is_exit_2_with_a_suggestion(bench):
    done = bench("demo-pgk")
    assert done.code == 2
    assert "did you mean demo-pkg?" in done.err
