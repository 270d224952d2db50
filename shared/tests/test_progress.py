import pytest

from chapbook_shared.progress import Progress, track


def test_silent_when_stderr_is_not_a_terminal(capsys):
    with Progress().task("work", total=2) as task:
        task.advance()
        task.describe("still working")
    assert list(track(range(3), "count")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_bars_go_to_stderr_and_nest(capsys):
    progress = Progress(enabled=True)
    with progress.task("outer", total=2) as outer:
        for _ in range(2):
            assert list(track(iter("ab"), "inner", progress=progress)) == ["a", "b"]
            outer.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert "outer" in err


def test_an_error_inside_a_task_passes_through():
    progress = Progress(enabled=True)
    with pytest.raises(ZeroDivisionError), progress.task("work"):
        1 / 0  # noqa: B018
    with progress.task("again", total=1) as task:
        task.advance()


def test_a_description_is_no_markup(capsys):
    with Progress(enabled=True).task("[/x] [red]y"):
        pass
    assert "[/x] [red]y" in capsys.readouterr().err
