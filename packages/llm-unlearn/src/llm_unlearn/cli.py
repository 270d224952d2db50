"""`llm-unlearn`: train, evaluate, run continual tasks and sweeps from a YAML file and key=value overrides.

Results are JSON lines on stdout, logs go to stderr. Exit status: 0 done, 1 unlearning diverged, 2 wrong use or bad input.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from chapbook_shared.jobs import atomic_write
from chapbook_shared.validate import import_extra

if TYPE_CHECKING:
    from .config import UnlearnConfig

_RUN_KEYS = {
    "model",
    "forget",
    "retain",
    "refusals",
    "lora",
    "sets",
    "tasks",
    "grid",
    "fix_ref_model",
    "evaluate",
    "chat",
}
_DATA = ("forget", "retain")
_EVALUATE_KEYS = {
    "metrics", "convention", "scenario", "encoder", "nli", "max_items", "max_new_tokens", "max_length", "batch_size", "cache_dir",
}  # fmt: skip
_SETS_NOTE = "a .jsonl, .json or .parquet file"

Settings = dict[str, Any]


class UsageError(ValueError):
    """Something in the command line, the configuration or the data is wrong."""


def main() -> None:
    """Entry point of the command `llm-unlearn`."""
    typer = import_extra("typer", "llm-unlearn[cli]")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    try:
        build_app(typer)()
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        from .trainer import UnlearningDiverged

        if not isinstance(error, UnlearningDiverged):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def build_app(typer: Any) -> Any:
    """The typer application."""
    app = typer.Typer(
        help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.")]
    overrides = Annotated[
        list[str] | None,
        typer.Argument(help="key=value, with dots for nesting: method=IDK+AP lora.r=8", show_default=False),
    ]
    seed = Annotated[int | None, typer.Option(help="Seed of order, pairing and initialisation.")]
    dry = Annotated[bool, typer.Option("--dry-run", help="Print the settings and stop.")]
    as_json = Annotated[
        bool, typer.Option("--json", help="Machine output (the only kind there is; accepted everywhere).")
    ]

    def command(work: Any) -> Any:
        def run(
            overrides: overrides = None,  # type: ignore[valid-type]
            config: config = None,  # type: ignore[valid-type]
            seed: seed = None,  # type: ignore[valid-type]
            dry_run: dry = False,  # type: ignore[valid-type]
            json: as_json = False,  # type: ignore[valid-type]
        ) -> None:
            settings = read_settings(config, overrides or [], seed)
            if dry_run:
                emit({"dry_run": work.__name__.lstrip("_"), "settings": settings})
            else:
                work(settings)

        # The aliases above are local to this function, so their names could not be looked up later.
        given = {"overrides": overrides, "config": config, "seed": seed, "dry_run": dry, "json": as_json}
        run.__annotations__ = {**given, "return": None}
        defaults = {"dry_run": False, "json": False}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(name), annotation=annotation
                )
                for name, annotation in given.items()
            ]
        )
        run.__doc__ = work.__doc__
        app.command(work.__name__.lstrip("_"))(run)

    for work in (_train, _eval, _continual, _sweep):
        command(work)
    return app


def read_settings(config: Path | None, overrides: list[str], seed: int | None = None) -> Settings:
    """The YAML file with the overrides on top."""
    yaml = import_extra("yaml", "llm-unlearn[cli]")
    settings: Settings = {}
    if config is not None:
        try:
            loaded = yaml.safe_load(config.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise UsageError(f"{config} is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(loaded, dict):
            raise UsageError(f"{config} must hold keys and values, not {type(loaded).__name__}")
        settings = loaded
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f"settings are given as key=value, got {override!r}")
        place = settings
        *above, last = key.split(".")
        for name in above:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise UsageError(f"{override!r}: {name} is not a group of settings")
        value = yaml.safe_load(text)
        place[last] = _number(value) if isinstance(value, str) else value
    if seed is not None:
        settings["seed"] = seed
    return settings


def _number(text: str) -> Any:
    """YAML 1.1 takes 1e-5 for a text."""
    try:
        return float(text)
    except ValueError:
        return text


def emit(record: Mapping[str, Any]) -> None:
    """One JSON object on a line of stdout."""
    print(json.dumps(record, ensure_ascii=False, default=str), flush=True)


def read_items(source: Any, name: str) -> list[dict[str, Any]]:
    """Rows of a file (JSON lines, a JSON array, Parquet), or rows written in the configuration itself."""
    if isinstance(source, list):
        return [dict(row) for row in source]
    if not isinstance(source, str):
        raise UsageError(f"{name} must be {_SETS_NOTE}, got {source!r}")
    path = Path(source)
    if not path.exists():
        raise UsageError(f"{name}: there is no file {path}")
    if path.suffix == ".parquet":
        datasets = import_extra("datasets", "llm-unlearn[tofu]")
        return [dict(row) for row in datasets.load_dataset("parquet", data_files=str(path), split="train")]
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else None
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: {path} is not JSON: {error}") from error
    if rows is None:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UsageError(f"{name}: line {number} of {path} is not JSON: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{name}: {path} must hold one object a row")
    return rows


def _train(settings: Settings) -> None:
    """Unlearn `forget`, keep `retain`. Evaluates `sets`, if given, before and after."""
    args = _arguments(settings)
    resume = _resumable(args, settings)  # before a model is loaded
    trainer = _trainer(settings, args)
    before = _report(trainer.model, trainer.processing_class, settings).to_dict() if settings.get("sets") else None
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    trainer.processing_class.save_pretrained(args.output_dir)
    record = {
        "output_dir": args.output_dir,
        "method": args.method,
        "steps": trainer.state.global_step,
        **trainer.evaluate(),
    }
    if before is not None:
        record["before"] = before
        record["report"] = _report(trainer.model, trainer.processing_class, settings).to_dict()
    emit(record)


def _eval(settings: Settings) -> None:
    """Evaluate `model` on `sets`: a line a set, then the aggregates."""
    model, tokenizer = _load(settings)
    report = _report(model, tokenizer, settings).to_dict()
    for name, values in report.pop("sets").items():
        emit({"set": name, **values})
    emit(report)


def _continual(settings: Settings) -> None:
    """Unlearn `tasks` in turn; a line a task.

    Each task has a name and what to forget."""
    from .continual import Task, run_tasks

    tasks = settings.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(t, dict) and {"name", "forget"} <= t.keys() for t in tasks):
        raise UsageError("tasks must be a list of entries with name and forget")
    args = _arguments(settings)
    _, tokenizer = _load(settings)
    records = run_tasks(
        lambda: _load(settings)[0],
        [Task(str(t["name"]), read_items(t["forget"], f"tasks: {t['name']}")) for t in tasks],
        retain=read_items(settings.get("retain", []), "retain"),
        processing_class=tokenizer,
        args=args,
        peft_config=_lora(settings),
        fix_ref_model=bool(settings.get("fix_ref_model", False)),
        evaluate=(lambda model, _: {"report": _report(model, tokenizer, settings).to_dict()})
        if settings.get("sets")
        else None,
        refusals=settings.get("refusals"),
    )
    for record in records:
        emit(record)


def _sweep(settings: Settings) -> None:
    """Train and evaluate all of `grid`; a line each.

    Done ones are kept in `<output_dir>/sweep.sqlite` and skipped."""
    from chapbook_shared.jobs import Store

    grid = settings.get("grid")
    if not isinstance(grid, dict) or not grid or not all(isinstance(v, list) and v for v in grid.values()):
        raise UsageError("grid must map settings to lists of values, such as grid.method=[ME+GD,IDK+AP]")
    base = {k: v for k, v in settings.items() if k != "grid"}
    output = Path(str(settings.get("output_dir", "unlearned")))
    output.mkdir(parents=True, exist_ok=True)
    cells = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for cell in cells:
        _arguments({**base, **cell})  # all settings are checked before the first model is trained
    data = {name: [_fingerprint(source, name) for source in grid.get(name, [base.get(name)])] for name in _DATA}
    with Store(output / "sweep.sqlite", settings=json.loads(json.dumps(base | {"data": data}, default=str))) as store:
        for cell in cells:
            key = json.dumps(cell, sort_keys=True)
            if key not in store:
                folder = output / f"cell-{hashlib.sha256(key.encode('utf-8')).hexdigest()[:10]}"
                merged = {**base, **cell, "output_dir": str(folder)}
                store.put(key, {**cell, **_cell(merged), "output_dir": str(folder)})
            emit(store.get(key))


def _cell(settings: Settings) -> dict[str, Any]:
    from .trainer import UnlearningDiverged

    args = _arguments(settings)
    resume = _resumable(args, settings)
    trainer = _trainer(settings, args)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except UnlearningDiverged as error:
        return {"diverged": str(error)}
    record: dict[str, Any] = dict(trainer.evaluate())
    if settings.get("sets"):
        record["report"] = _report(trainer.model, trainer.processing_class, settings).to_dict()
    return record


def _arguments(settings: Settings) -> UnlearnConfig:
    from .config import UnlearnConfig

    known = {field.name for field in dataclasses.fields(UnlearnConfig) if field.init}
    own = {k: v for k, v in settings.items() if k in known}
    unknown = settings.keys() - known - _RUN_KEYS
    if unknown:
        raise UsageError(f"unknown settings: {', '.join(sorted(unknown))}")
    own.setdefault("disable_tqdm", True)  # the bar of transformers writes its log lines to stdout, which is for results
    try:
        return UnlearnConfig(**own)
    except TypeError as error:
        raise UsageError(f"a setting has a value of the wrong type: {error}") from error


def _load(settings: Settings) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = settings.get("model")
    if not isinstance(name, str) or not name:
        raise UsageError("model must name a model or a folder: model=path/to/model")
    adapter = Path(name) / "adapter_config.json"
    if adapter.exists():
        peft = import_extra("peft", "llm-unlearn[peft]")
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), name, is_trainable=True)
        tokenizer = AutoTokenizer.from_pretrained(name if (Path(name) / "tokenizer_config.json").exists() else base)
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    if settings.get("chat") is False:
        tokenizer.chat_template = None
    return model, tokenizer


def _lora(settings: Settings) -> Any:
    given = settings.get("lora")
    if not given:
        return None
    if given is not True and not isinstance(given, dict):
        raise UsageError(f"lora must be true or a group of settings such as lora.r=8, got {given!r}")
    peft = import_extra("peft", "llm-unlearn[peft]")
    options = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    if isinstance(given, dict):
        short = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
        options |= {short.get(str(k), str(k)): v for k, v in given.items()}
    try:
        return peft.LoraConfig(**options)
    except TypeError as error:
        raise UsageError(f"lora: {error}") from error


def _trainer(settings: Settings, args: UnlearnConfig) -> Any:
    from transformers import PrinterCallback

    from .data import check_sets
    from .objectives import parse_method
    from .trainer import UnlearnTrainer

    if "forget" not in settings:
        raise UsageError(f"forget must be {_SETS_NOTE}: forget=forget.jsonl")
    forget = read_items(settings["forget"], "forget")
    retain = read_items(settings["retain"], "retain") if settings.get("retain") else None
    method = parse_method(args.method)
    check_sets(forget, retain, needs_retain=method.needs_retain, strict=args.strict, method=method.name)
    model, tokenizer = _load(settings)
    trainer = UnlearnTrainer(
        model,
        args,
        forget_dataset=forget,
        retain_dataset=retain,
        processing_class=tokenizer,
        peft_config=_lora(settings),
        refusals=settings.get("refusals"),
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for results
    return trainer


def _resumable(args: UnlearnConfig, settings: Settings) -> bool:
    """Whether the output folder holds a checkpoint of this very run; one of another run is an error, not a result."""
    from .trainer import last_checkpoint

    output = Path(args.output_dir or ".")
    output.mkdir(parents=True, exist_ok=True)
    run = {k: v for k, v in settings.items() if k not in ("output_dir", "sets", "evaluate")}
    run = json.loads(
        json.dumps(run | {"data": [_fingerprint(settings.get(name), name) for name in _DATA]}, default=str)
    )
    note = output / "run.json"
    resume = last_checkpoint(output) is not None
    begun = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    if resume and begun != run:
        differing = sorted(name for name in run.keys() | begun.keys() if run.get(name) != begun.get(name))
        raise UsageError(
            f"{output} holds checkpoints of a run with other settings ({', '.join(differing)}): use another output_dir, or remove them"
        )
    with atomic_write(note) as file:
        json.dump(run, file, ensure_ascii=False, indent=1)
    return resume


def _fingerprint(source: Any, name: str) -> str | None:
    from .data import fingerprint

    return fingerprint(read_items(source, name)) if source else None


def _report(model: Any, tokenizer: Any, settings: Settings) -> Any:
    from . import metrics as m
    from .evaluation import evaluate_unlearning

    sets = settings.get("sets")
    if not isinstance(sets, dict) or not sets:
        raise UsageError("sets must map names to files: sets.forget=forget.jsonl sets.retain=retain.jsonl")
    options = dict(settings.get("evaluate") or {})
    unknown = options.keys() - _EVALUATE_KEYS
    if unknown:
        raise UsageError(
            f"unknown settings in evaluate: {', '.join(sorted(unknown))}; known: {', '.join(sorted(_EVALUATE_KEYS))}"
        )
    if isinstance(options.get("encoder"), str):
        options["encoder"] = m.sentence_encoder(options["encoder"])
    if isinstance(options.get("nli"), str):
        options["nli"] = m.nli_model(options["nli"])
    return evaluate_unlearning(
        model, tokenizer, {name: read_items(source, f"sets: {name}") for name, source in sets.items()}, **options
    )
