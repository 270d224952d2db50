import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from topograph_loss.cli import app

LINE = np.zeros((5, 9), np.uint8)
LINE[2] = 1
GAP = LINE.copy()
GAP[2, 4] = 0


@pytest.fixture
def folders(tmp_path):
    pred, gt = tmp_path / "pred", tmp_path / "gt"
    for folder, first in ((pred, GAP), (gt, LINE)):
        (folder / "série").mkdir(parents=True)
        np.save(folder / "a.npy", first)
        np.save(folder / "série" / "β 2.npy", LINE)
    return pred, gt


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_two_folders_as_json(folders):
    result = run(*folders, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["mean_diu"] == 0.5
    assert [(case["name"], case["diu"], case["split"]) for case in report["cases"]] == [
        ("a", 1, 1),
        ("série/β 2", 0, 0),
    ]
    assert report["settings"] == {"border": "background", "connectivity": None, "labels": None}


def test_csv_and_a_table(folders, tmp_path):
    result = run(*folders, "--csv", tmp_path / "out.csv", "--border", "open")
    assert result.exit_code == 0
    assert "mean DIU 1 over 2 cases" in result.stdout
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["diu"], row["ker_i0"], row["ker_j0"]) for row in rows] == [
        ("a", "2", "1", "1"),
        ("série/β 2", "0", "0", "0"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gt", "out.csv", "pred"]


def test_labels_are_scored_apart(tmp_path):
    np.save(tmp_path / "p.npy", np.array([[1, 1, 0, 2, 0, 2]]))
    np.save(tmp_path / "g.npy", np.array([[1, 1, 0, 2, 2, 2]]))
    result = run(tmp_path / "p.npy", tmp_path / "g.npy", "--json", "--label", 1, "--label", 2)
    assert [(case["label"], case["diu"]) for case in json.loads(result.stdout)["cases"]] == [(1, 0), (2, 1)]


def test_pictures_and_nifti(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(255 * GAP).save(tmp_path / "gap.png")
    Image.fromarray(255 * LINE).save(tmp_path / "line.tif")
    assert json.loads(run(tmp_path / "gap.png", tmp_path / "line.tif", "--json").stdout)["mean_diu"] == 1
    nibabel = pytest.importorskip("nibabel")
    pytest.importorskip("gudhi")
    for name, mask in (("gap", GAP), ("line", LINE)):
        nibabel.save(nibabel.Nifti1Image(mask[None].repeat(3, 0), np.eye(4)), tmp_path / f"{name}.nii.gz")
    assert json.loads(run(tmp_path / "gap.nii.gz", tmp_path / "line.nii.gz", "--json").stdout)["mean_diu"] == 1


def test_a_tiff_of_several_pages_is_a_volume(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("gudhi")
    for name, last in (("pred", GAP), ("gt", LINE)):
        first, *others = map(Image.fromarray, (LINE, LINE, last))
        first.save(tmp_path / f"{name}.tif", save_all=True, append_images=others)
    [case] = json.loads(run(tmp_path / "pred.tif", tmp_path / "gt.tif", "--json").stdout)["cases"]
    assert (case["pred_pixels"], case["gt_pixels"]) == (26, 27)
    np.save(tmp_path / "gt.npy", LINE)
    assert "pred has shape (3, 5, 9)" in run(tmp_path / "pred.tif", tmp_path / "gt.npy").stderr


def test_pixels_of_float_and_of_16_bits_in_the_order_of_imagej(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    np.save(tmp_path / "gt.npy", LINE)
    Image.fromarray(GAP.astype(np.float32)).save(tmp_path / "float.tif")
    Image.frombytes("I;16B", (9, 5), GAP.astype(">u2").tobytes()).save(tmp_path / "big.tif")
    for name in ("float.tif", "big.tif"):
        assert json.loads(run(tmp_path / name, tmp_path / "gt.npy", "--json").stdout)["mean_diu"] == 1
    Image.fromarray(LINE * np.float32(0.5)).save(tmp_path / "soft.tif")
    assert "labels must be whole numbers" in run(tmp_path / "soft.tif", tmp_path / "gt.npy").stderr


def test_the_check_says_no_with_status_1(folders):
    assert run(*folders, "--max-diu", 0.4).exit_code == 1
    assert run(*folders, "--max-diu", 0.5).exit_code == 0


def spoil_missing(pred, gt):
    (gt / "a.npy").unlink()
    return "no partner for"


def spoil_shape(pred, gt):
    np.save(pred / "a.npy", LINE.T)
    return "a.npy: pred has shape"


def spoil_garbage(pred, gt):
    (pred / "a.npy").write_bytes(b"not an array\n\xff")
    return "cannot be read"


def spoil_pickle(pred, gt):
    np.save(pred / "a.npy", np.array([{}], object), allow_pickle=True)
    return "cannot be read"


def spoil_scores(pred, gt):
    np.save(pred / "a.npy", LINE * 0.3)
    return "labels must be whole numbers"


def spoil_nan(pred, gt):
    np.save(pred / "a.npy", np.full((5, 9), np.nan))
    return "labels must be whole numbers"


def spoil_axes(pred, gt):
    np.save(pred / "a.npy", np.zeros((1, 1, 5, 9)))
    return "needs 2 or 3 axes"


def spoil_twins(pred, gt):
    (pred / "a.png").write_bytes(b"")
    return "have the same name"


def spoil_colour(pred, gt):
    Image = pytest.importorskip("PIL.Image")
    for folder in (pred, gt):
        (folder / "a.npy").unlink()
        Image.new("RGB", (9, 5)).save(folder / "a.png")
    return "a RGB picture has no labels"


def spoil_empty(pred, gt):
    for folder in (pred, gt):
        for path in folder.rglob("*.npy"):
            path.unlink()
    return "no file with one of the suffixes"


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_missing,
        spoil_shape,
        spoil_garbage,
        spoil_pickle,
        spoil_scores,
        spoil_nan,
        spoil_axes,
        spoil_twins,
        spoil_colour,
        spoil_empty,
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(folders, spoil):
    message = spoil(*folders)
    result = run(*folders)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--border", "sphere"], "--border must be one of"),
        (["--connectivity", "8"], "--connectivity must be one of"),
        (["--connectivity", "fg26"], "connectivity of a 2D image"),
        (["--csv", "/no/such/folder/out.csv"], "there is no folder /no/such/folder"),
        (["--max-diu", "nan"], "--max-diu must be >= 0 and finite, got nan"),
        (["--max-diu", "-1"], "--max-diu must be >= 0 and finite, got -1.0"),
        (["--label", "1", "--label", "255"], "--label 255 occurs in no mask"),
    ],
)
def test_wrong_use_is_status_2(folders, arguments, message):
    result = run(*folders, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_against_a_folder_and_a_path_that_is_not_there(folders):
    pred, gt = folders
    assert run(pred / "a.npy", gt).exit_code == 2
    assert run(pred / "z.npy", gt / "a.npy").exit_code == 2
    assert run(pred / "a.npy", gt / "a.npy").exit_code == 0


def test_an_unknown_suffix(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    assert "unknown format" in run(tmp_path / "a.jpg", tmp_path / "a.jpg").stderr


def test_the_command_runs_in_a_plain_locale(folders):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", "from topograph_loss.cli import main; main()", *map(str, folders), "--json"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert json.loads(done.stdout.decode("utf-8", "surrogateescape"))["mean_diu"] == 0.5
    assert done.stderr == b""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file names that are not UTF-8")
def test_output_is_utf_8_whatever_the_terminal_says_and_the_file_is_called(tmp_path):
    for folder, mask in (("pred", GAP), ("gt", LINE)):
        (tmp_path / folder).mkdir()
        with open(os.fsencode(tmp_path / folder) + b"/\xc3\xa9\xff.npy", "wb") as file:
            np.save(file, mask)
    command = [sys.executable, "-c", "from topograph_loss.cli import main; main()", tmp_path / "pred", tmp_path / "gt"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--json"], capture_output=True, env=environment, check=True)
    assert [case["name"] for case in json.loads(done.stdout.decode("utf-8"))["cases"]] == ["é\udcff"]
    assert "é" in subprocess.run(command, capture_output=True, env=environment, check=True).stdout.decode("utf-8")


def test_help_explains_itself():
    result = run("--help")
    assert result.exit_code == 0
    assert "topological errors" in result.stdout
    assert "'topograph-loss[images]'" in " ".join(result.stdout.split())


def test_an_interrupt_is_neither_done_nor_a_no(folders):
    script = (
        "import topograph_loss.cli as cli\n"
        "def interrupted(*args, **options): raise KeyboardInterrupt\n"
        "cli.diu = interrupted\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
