"""The independent sweep: learning rate first, then each multiplier alone, then all best values together.

Under u-muP multipliers hardly depend on one another (paper, sec. 4), so one line search each replaces a random search over
their product; the combination is kept only if it beats the best learning rate alone. Runs are stored as they finish, so a
killed sweep goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chapbook_shared.jobs import Store
from chapbook_shared.progress import Progress

__all__ = ["SweepError", "SweepResult", "log2grid", "sweep", "transfer_error"]

Params = dict[str, Any]
Train = Callable[..., float]


class SweepError(RuntimeError):
    """Some runs raised. Those that finished are stored; running the sweep again retries the rest."""


def log2grid(low: float, high: float, step: float = 1.0) -> list[float]:
    """Powers of two from 2^low to 2^high, `step` apart in the exponent."""
    if not (step > 0 and high >= low):
        raise ValueError(f"need high >= low and step > 0, got {low}, {high}, {step}")
    return [2.0 ** (low + i * step) for i in range(int((high - low) / step + 1e-9) + 1)]


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def _version(train: Train) -> str:
    """What fixes the meaning of a result: the training function's name and source, and a partial's arguments."""
    bound: Any = []
    function: Any = train
    while isinstance(function, functools.partial):
        bound.append([list(function.args), function.keywords])
        function = function.func
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ""
    digest = hashlib.sha256((source + repr(bound)).encode()).hexdigest()[:16]
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}:{digest}"
    )


def _run(train: Train, params: Params, threads: int | None) -> float:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    loss = float(train(**params))
    return loss if math.isfinite(loss) else math.inf


@dataclass
class SweepResult:
    """The sweep's outcome. `records`: phase, params, loss (mean over seeds), in order. Losses are nats or whatever is trained."""

    best: Params
    loss: float
    lr_only: tuple[float, float]
    combined: tuple[Params, float] | None
    records: list[dict[str, Any]]

    def line(self, name: str) -> list[tuple[float, float]]:
        """(value, loss) of the phase that varied `name`, by value."""
        rows = [r for r in self.records if r["phase"] == name]
        return sorted((r["params"][name], r["loss"]) for r in rows)


def sweep(
    train: Train,
    *,
    lrs: Sequence[float],
    alphas: Mapping[str, Sequence[float]] | None = None,
    fixed: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (0,),
    store: str | Path,
    export: str | Path | None = None,
    jobs: int = 1,
    pool: Executor | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Tune `train(lr=..., <alpha>=..., seed=..., **fixed) -> loss` by the independent sweep.

    `store`: SQLite file of finished runs; the same sweep on it resumes, another training function, other `fixed` or another
    version of its source raises `SettingsMismatchError`, a second process on it `StoreLockedError`. `export`: also write the
    runs as JSON lines. `jobs` > 1: that many spawned processes, a share of the cores each; `train` must then be importable.
    `pool`: run there instead (its size in `jobs`).

    A non-finite loss is recorded as infinity; a run that raises is not recorded, the others finish, then `SweepError`.
    """
    alphas, fixed = dict(alphas or {}), dict(fixed or {})
    for name, values in {"lrs": lrs, "seeds": seeds, **alphas}.items():
        if not len(values):
            raise ValueError(f"{name} is empty: give at least one value")
    for name, values in {"lr": lrs, **alphas}.items():
        bad = [v for v in values if not (v > 0 and math.isfinite(v))]
        if bad:
            raise ValueError(f"{name} must hold positive finite numbers, got {bad[0]}")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    clash = sorted({"lr", "seed", *alphas} & set(fixed))
    if clash:
        raise ValueError(f"{clash} are swept, so they cannot be fixed too")
    progress = progress or Progress(enabled=False)
    records: list[dict[str, Any]] = []
    own_pool = None
    if pool is None and jobs > 1:
        pool = own_pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        with Store(store, settings={"train": _version(train), "fixed": fixed}) as runs:

            def phase(name: str, candidates: list[Params]) -> list[float]:
                wanted = [c | {"seed": s} for c in candidates for s in seeds]
                _finish(train, wanted, fixed, runs, pool, jobs, name, progress)
                losses = []
                for candidate in candidates:
                    each = [runs.get(_key(candidate | {"seed": s}))["loss"] for s in seeds]
                    losses.append(sum(each) / len(each))
                    records.append({"phase": name, "params": candidate, "loss": losses[-1]})
                return losses

            try:
                result = _phases(phase, list(lrs), alphas, records)
            finally:
                if export is not None:
                    runs.export_jsonl(export)
            return result
    finally:
        if own_pool is not None:
            own_pool.shutdown(cancel_futures=True)


def _phases(
    phase: Callable[[str, list[Params]], list[float]],
    lrs: list[float],
    alphas: dict[str, Sequence[float]],
    records: list[dict[str, Any]],
) -> SweepResult:
    losses = phase("lr", [{"lr": lr} for lr in lrs])
    best_loss = min(losses)
    if not math.isfinite(best_loss):
        raise SweepError(f"every learning rate diverged ({lrs}): sweep smaller ones")
    best_lr = lrs[losses.index(best_loss)]
    chosen: Params = {"lr": best_lr}
    for name, values in alphas.items():
        line = phase(name, [{"lr": best_lr, name: value} for value in values])
        if min(line) < best_loss:
            chosen[name] = list(values)[line.index(min(line))]
    combined = None
    best, loss = {"lr": best_lr}, best_loss
    if len(chosen) > 1:
        (combined_loss,) = phase("combined", [chosen])
        combined = (chosen, combined_loss)
        if combined_loss < best_loss:
            best, loss = chosen, combined_loss
    return SweepResult(best, loss, (best_lr, best_loss), combined, records)


def _finish(
    train: Train,
    wanted: list[Params],
    fixed: Params,
    runs: Store,
    pool: Executor | None,
    jobs: int,
    name: str,
    progress: Progress,
) -> None:
    by_key = {_key(params): params for params in wanted}
    missing = runs.missing(by_key)
    failures: list[str] = []

    def keep(key: str, outcome: Callable[[], float]) -> None:
        try:
            loss = outcome()
        except Exception as error:
            failures.append(f"{key}: {type(error).__name__}: {error}")
        else:
            runs.put(key, {"params": by_key[key], "loss": loss})

    with progress.task(f"sweep {name}", total=len(missing)) as task:
        if pool is None:
            for key in missing:
                keep(key, functools.partial(_run, train, fixed | by_key[key], None))
                task.advance()
        else:
            threads = max((os.cpu_count() or 1) // jobs, 1)
            futures = {pool.submit(_run, train, fixed | by_key[key], threads): key for key in missing}
            for future in as_completed(futures):
                keep(futures[future], future.result)
                task.advance()
    if failures:
        raise SweepError(
            f"{len(failures)} of {len(missing)} runs raised; the others are stored, run again to retry:\n  "
            + "\n  ".join(failures[:5])
        )


def transfer_error(losses: Sequence[Sequence[float]], *, reference: int = 0) -> float:
    """Transfer error of a hyperparameter f against a partner g (paper, app. A): 0 when they are independent.

    `losses[i][j]`: loss at f's i-th and g's j-th value. f is tuned at g's `reference` value; the result is the mean over the
    other g of loss(f tuned there, g) - min over f of loss(f, g).
    """
    table = np.asarray(losses, dtype=float)
    if table.ndim != 2 or table.shape[1] < 2:
        raise ValueError(f"losses must be a table with at least two columns, got shape {table.shape}")
    tuned = int(np.argmin(table[:, reference]))
    excess = table[tuned] - table.min(axis=0)
    return float(np.delete(excess, reference).mean())
