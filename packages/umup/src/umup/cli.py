"""`umup`: coordinate check, sweep and scale report of the built-in byte-level language model, on your own text.

Results go to stdout (`--json` for machines), progress and errors to stderr. Exit 0: done; 1: the check says no; 2: wrong use.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from chapbook_shared.validate import import_extra

typer = import_extra("typer", "umup[cli]")

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

Text = Annotated[
    str | None,
    typer.Option(help="A text file, or a folder of .py, .txt, .md and .rst files. Default: torch's sources."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and batches.")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    from umup.tuning import SweepError

    try:
        yield
    except KeyboardInterrupt:
        print("umup: interrupted; what has finished is stored, run again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    except SweepError as error:
        print(f"umup: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"umup: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _numbers(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{name} must be numbers separated by commas, got {text!r}") from None


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path)
    print(f"wrote {path}", file=sys.stderr)


@app.command("coord-check")
def coord_check_command(
    widths: Annotated[str, typer.Option(help="Widths, multiples of 16.")] = "32,64,128,256",
    scheme: Annotated[str, typer.Option(help="umup, mup or sp.")] = "umup",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 3,
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 2,
    seeds: Annotated[int, typer.Option(help="Models per width.", min=1)] = 2,
    tolerance: Annotated[float, typer.Option(help="Largest slope that passes.")] = 0.25,
    text: Text = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here (umup[plot]).")] = None,
    as_json: Json = False,
) -> None:
    """How far outputs move in a few steps, against width. Exit 1 if a slope is above the tolerance.

    Under u-muP the embedding's is -1/2, by the paper's rule for its learning rate.
    """
    with _one_line_errors():
        from umup.bytelm import batches, build, optimizer_for, text_bytes
        from umup.tracking import coord_check

        data = batches(text_bytes(text), steps, 8, 64, seed)
        check = coord_check(
            lambda width: build(scheme, width, depth=depth),
            lambda model: optimizer_for(model, scheme, lr),
            lambda model, ids: model.loss(ids),  # type: ignore[operator]
            widths=[int(w) for w in _numbers(widths, "widths")],
            batches=list(data),
            seeds=[seed + i for i in range(seeds)],
            modules=lambda name: name.endswith(("embed_tokens", "o_proj", "down_proj", "norm", "lm_head")),
        )
        slopes, failing = check.slopes(), check.failing(tolerance, growth_only=True)
        for module in dict.fromkeys([*slopes, *failing]):
            slope = slopes.get(module, math.inf)
            if as_json:
                print(json.dumps({"module": module, "slope": slope, "holds": module not in failing}))
            else:
                print(f"{module:40} slope {slope:+.3f}  {'grows with width' if module in failing else 'ok'}")
        if plot is not None:
            from umup.plots import plot_coord_check

            _save(plot_coord_check(check), plot)
    raise typer.Exit(1 if failing else 0)


@app.command("sweep")
def sweep_command(
    store: Annotated[Path, typer.Option(help="SQLite file of finished runs; an interrupted sweep goes on from it.")],
    lrs: Annotated[str, typer.Option(help="Learning rates.")] = "0.25,0.5,1,2,4",
    alpha: Annotated[
        list[str] | None,
        typer.Option(help="A multiplier to sweep, e.g. --alpha alpha_res=0.125,0.25,0.5,2. Repeatable."),
    ] = None,
    width: Annotated[int, typer.Option(help="Width of the proxy, a multiple of 16.")] = 32,
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Training steps a run.", min=1)] = 150,
    seeds: Annotated[int, typer.Option(help="Runs per setting.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    text: Text = None,
    seed: Seed = 0,
    export: Annotated[Path | None, typer.Option(help="Write the runs here, as JSON lines.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here (umup[plot]).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many runs it would take, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Tune the proxy: learning rate first, then each multiplier alone, then the combination."""
    with _one_line_errors():
        from chapbook_shared.progress import Progress
        from umup.bytelm import ALPHAS, train
        from umup.tuning import sweep

        rates = _numbers(lrs, "lrs")
        alphas: dict[str, list[float]] = {}
        for entry in alpha or []:
            name, _, values = entry.partition("=")
            if name not in ALPHAS or not values:
                raise ValueError(f"--alpha wants NAME=VALUE,VALUE with a name among {list(ALPHAS)}, got {entry!r}")
            alphas[name] = _numbers(values, name)
        if dry_run:
            runs = (len(rates) + sum(map(len, alphas.values())) + bool(alphas)) * seeds
            print(json.dumps({"runs_at_most": runs}) if as_json else f"at most {runs} runs of {steps} steps")
            return
        result = sweep(
            functools.partial(train, "umup", width),
            lrs=rates,
            alphas=alphas,
            fixed={"steps": steps, "depth": depth, "source": text},
            seeds=[seed + i for i in range(seeds)],
            store=store,
            export=export,
            jobs=jobs,
            progress=Progress(),
        )
        if as_json:
            for record in result.records:
                print(json.dumps(record))
            print(json.dumps({"best": result.best, "loss": result.loss}))
        else:
            for record in result.records:
                print(f"{record['phase']:22} {json.dumps(record['params']):50} {record['loss']:.4f}")
            print(
                f"best {json.dumps(result.best)} loss {result.loss:.4f} (learning rate alone: {result.lr_only[1]:.4f})"
            )
        if plot is not None:
            from umup.plots import plot_sweep

            _save(plot_sweep(result), plot)


@app.command("report")
def report_command(
    width: Annotated[int, typer.Option(help="Width, a multiple of 16.")] = 64,
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 2,
    scheme: Annotated[str, typer.Option(help="umup, mup or sp.")] = "umup",
    steps: Annotated[int, typer.Option(help="Train this many steps first.", min=0)] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of those steps.")] = 1.0,
    text: Text = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here (umup[plot]).")] = None,
    as_json: Json = False,
) -> None:
    """Root mean squares of activations, gradients and weights, at initialisation or after some steps."""
    with _one_line_errors():
        import torch

        from umup.bytelm import batches, build, optimizer_for, text_bytes
        from umup.tracking import scale_report

        data = batches(text_bytes(text), steps + 1, 8, 64, seed)
        torch.manual_seed(seed)
        model = build(scheme, width, depth=depth)
        optimizer = optimizer_for(model, scheme, lr)
        for ids in data[:-1]:
            optimizer.zero_grad()
            model.loss(ids).backward()  # type: ignore[operator]
            optimizer.step()
        report = scale_report(model, lambda m: m.loss(data[-1]))  # type: ignore[operator]
        print(report.to_json() if as_json else report)
        if plot is not None:
            from umup.plots import plot_scales

            _save(plot_scales({scheme: report}), plot)


def main() -> None:
    """Entry point of the `umup` command."""
    app()
