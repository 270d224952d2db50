"""The command `topograph-diu`: score a mask, or a folder of masks, against the truth."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from chapbook_shared.jobs import atomic_write
from chapbook_shared.progress import track
from chapbook_shared.validate import check_nonnegative
from topograph_loss.complex import BORDERS, CONNECTIVITY
from topograph_loss.diu import diu
from topograph_loss.images import SUFFIXES, read_labels, suffix_of
from topograph_loss.regions import KINDS, critical_regions

app = typer.Typer(add_completion=False, rich_markup_mode=None)  # the help has brackets that are no markup


def main() -> None:
    """Entry point. Exit status 0: done; 1: the mean exceeds --max-diu; 2: wrong use or bad input."""
    for stream in (sys.stdout, sys.stderr):  # whatever the locale; a name that is no UTF-8 is escaped as JSON does
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    app()


@app.command()
def score(
    pred: Annotated[Path, typer.Argument(help="Predicted mask, or a folder of them.", show_default=False)],
    gt: Annotated[
        Path, typer.Argument(help="True mask, or a folder with files of the same names.", show_default=False)
    ],
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write one row a case to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    label: Annotated[
        list[int] | None, typer.Option(help="Score this label alone; may be repeated. [default: all that is not 0]")
    ] = None,
    border: Annotated[
        str, typer.Option(help="'background' frames the image, as DIU is defined; 'open' does not.")
    ] = "background",
    connectivity: Annotated[
        str | None, typer.Option(help="Of the foreground: fg8 or fg4, in 3D fg26 or fg6. [default: fg8, fg26]")
    ] = None,
    max_diu: Annotated[float | None, typer.Option(help="Exit with status 1 if the mean DIU is above this.")] = None,
) -> None:
    """Count topological errors (DIU) between masks: files or folders of .npy, .png, .tif, .bmp, .nii or .nii.gz.

    Folders are matched by path and name without the suffix. Pictures and NIfTI need pip install 'topograph-loss[images]', volumes
    'topograph-loss[gudhi]'.
    """
    try:
        if border not in BORDERS:
            raise ValueError(f"--border must be one of {', '.join(BORDERS)}, got {border}")
        if connectivity not in (None, *CONNECTIVITY[2], *CONNECTIVITY[3]):
            raise ValueError(f"--connectivity must be one of fg8, fg4, fg26, fg6, got {connectivity}")
        if max_diu is not None:
            check_nonnegative("--max-diu", max_diu)
        if csv_file is not None and not csv_file.absolute().parent.is_dir():
            raise ValueError(f"--csv {csv_file}: there is no folder {csv_file.parent}")
        pairs = list(match(pred, gt))
        cases = [
            case
            for name, files in track(pairs, "scoring")
            for case in score_pair(name, *files, labels=label, border=border, connectivity=connectivity)
        ]
        for one in label or []:
            if not any(case["pred_pixels"] or case["gt_pixels"] for case in cases if case["label"] == one):
                raise ValueError(f"--label {one} occurs in no mask")
        if csv_file is not None:
            write_csv(csv_file, cases)
    except (ValueError, ImportError, OSError) as error:
        print(f"topograph-diu: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    mean = float(np.mean([case["diu"] for case in cases]))
    if as_json:
        settings = {"border": border, "connectivity": connectivity, "labels": label}
        print(json.dumps({"settings": settings, "mean_diu": mean, "cases": cases}, ensure_ascii=False))
    else:
        print_table(cases, mean)
    if max_diu is not None and mean > max_diu:
        print(f"topograph-diu: mean DIU {mean:.4g} is above {max_diu:g}", file=sys.stderr)
        raise typer.Exit(1)


def match(pred: Path, gt: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """(name, (prediction, truth)) of two files, or of all files of two folders, sorted by name.

    Raises ValueError if a file has no partner, or a folder no file.
    """
    for path in (pred, gt):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if pred.is_dir() != gt.is_dir():
        raise ValueError(f"{pred} and {gt} must both be files or both be folders")
    if not pred.is_dir():
        yield _stem(pred, pred.parent), (pred, gt)
        return
    ours, theirs = _images_in(pred), _images_in(gt)
    for here, there, folder in ((ours, theirs, gt), (theirs, ours, pred)):
        lonely = sorted(here.keys() - there.keys())
        if lonely:
            more = f" and {len(lonely) - 1} more" if len(lonely) > 1 else ""
            raise ValueError(f"{folder}: no partner for {here[lonely[0]]}{more}")
    if not ours:
        raise ValueError(f"{pred}: no file with one of the suffixes {', '.join(SUFFIXES)}")
    for name in sorted(ours):
        yield name, (ours[name], theirs[name])


def _images_in(folder: Path) -> dict[str, Path]:
    images: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or not suffix_of(path) or path.name.startswith("."):
            continue
        name = _stem(path, folder)
        if name in images:
            raise ValueError(f"{path} and {images[name]} have the same name")
        images[name] = path
    return images


def _stem(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    return name[: len(name) - len(suffix_of(path))]


def score_pair(
    name: str, pred: Path, gt: Path, *, labels: list[int] | None, border: str, connectivity: str | None
) -> Iterator[dict[str, Any]]:
    """One case for each label, or one for everything that is not 0."""
    ours, theirs = read_labels(pred), read_labels(gt)
    for label in labels or [None]:  # type: ignore[list-item]
        P, G = (image != 0 if label is None else image == label for image in (ours, theirs))
        try:
            terms = diu(P, G, border=border, connectivity=connectivity)
            regions = critical_regions(P, G, border=border, connectivity=connectivity)
        except ValueError as error:
            raise ValueError(f"{pred}: {error}") from None
        count = regions.count()
        yield {
            "name": name,
            "label": label,
            "pred_pixels": int(np.count_nonzero(P)),
            "gt_pixels": int(np.count_nonzero(G)),
            "diu": terms.total,
            **terms.as_dict(),
            "critical": len(regions),
            **{kind.replace(" ", "_"): count.get(kind, 0) for kind in KINDS},
        }


def write_csv(path: Path, cases: list[dict[str, Any]]) -> None:
    """Write the cases, whole or not at all."""
    text = io.StringIO(newline="")
    rows = csv.DictWriter(text, list(cases[0]), lineterminator="\n")
    rows.writeheader()
    rows.writerows(cases)
    with atomic_write(path) as file:
        file.write(text.getvalue())


def print_table(cases: list[dict[str, Any]], mean: float) -> None:
    """The cases on stdout, with the kinds that occur."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    kinds = [key for kind in KINDS if any(case[key := kind.replace(" ", "_")] for case in cases)]
    columns = [*(["label"] if cases[0]["label"] is not None else []), "diu", "critical", *kinds]
    table = Table("name", *(column.replace("_", " ") for column in columns))
    for case in cases:
        table.add_row(escape(case["name"]), *(str(case[column]) for column in columns))
    console = Console()
    console.print(table)
    console.print(f"mean DIU {mean:.4g} over {len(cases)} cases")
