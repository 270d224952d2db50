import math

import pytest

from chapbook_shared.validate import (
    check_choice,
    check_fraction,
    check_int,
    check_nonnegative,
    check_positive,
    import_extra,
)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", None])
def test_positive_refuses(value):
    with pytest.raises(ValueError, match="width must be positive and finite, got"):
        check_positive("width", value)


@pytest.mark.parametrize("value", [-1e-9, math.nan, -math.inf, False, "0"])
def test_nonnegative_refuses(value):
    with pytest.raises(ValueError, match="width must be >= 0 and finite, got"):
        check_nonnegative("width", value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, True])
def test_fraction_refuses(value):
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got"):
        check_fraction("share", value)


def test_the_limits_themselves_are_allowed():
    check_positive("x", 1e-300)
    check_nonnegative("x", 0)
    check_fraction("x", 0)
    check_fraction("x", 1)
    check_int("x", 3, minimum=3, maximum=3)
    check_choice("x", "a", ("a", "b"))


def test_integers_are_told_from_floats_and_truth_values():
    for value in (1.0, True, "1"):
        with pytest.raises(TypeError, match="k must be an integer, got"):
            check_int("k", value)
    with pytest.raises(ValueError, match="k must be >= 1, got 0"):
        check_int("k", 0, minimum=1)
    with pytest.raises(ValueError, match="k must be <= 5, got 6"):
        check_int("k", 6, maximum=5)


def test_numpy_scalars_are_numbers():
    numpy = pytest.importorskip("numpy")
    check_positive("x", numpy.float32(0.5))
    check_int("k", numpy.int64(2), minimum=1)


def test_choice_lists_the_choices():
    with pytest.raises(ValueError, match="mode must be one of 'mean', 'sum', got 'max'"):
        check_choice("mode", "max", ("mean", "sum"))
    for choices in ({"mean": 1, "sum": 2}, {"mean", "sum"}):
        with pytest.raises(ValueError, match=r"mode must be one of .*, got \['mean'\]"):
            check_choice("mode", ["mean"], choices)


def test_a_missing_extra_names_the_install_line():
    with pytest.raises(ImportError, match=r"no_such_library is needed .* pip install 'topograph-loss\[monai\]'"):
        import_extra("no_such_library.losses", "topograph-loss[monai]")


def test_a_library_that_is_there_but_broken_raises_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import the_library_it_forgot", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="the_library_it_forgot"):
        import_extra("broken_library", "x[y]")
    assert import_extra("json", "x[y]").__name__ == "json"
