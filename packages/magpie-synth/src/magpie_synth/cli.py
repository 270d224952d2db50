"""The command `magpie-synth`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chapbook_shared.embed import SentenceEmbedder
from chapbook_shared.jobs import SettingsMismatchError, StoreLockedError, atomic_write
from chapbook_shared.lm import LanguageModelError
from chapbook_shared.validate import check_choice, import_extra

from . import card as cards
from . import filters, tagging
from .domains import DOMAINS
from .exports import FORMATS, write_rows, write_shards
from .generation import Magpie
from .models import ModelSpec
from .neighbors import annotate_neighbors
from .preferences import Scorer
from .rows import Run
from .settings import AIR, PRO, InstructionSettings, ResponseSettings
from .template import derive_template

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Instruction data out of an aligned model. `template` shows the prompt; `generate` makes the rows, and the same command goes on "
    "when it was cut short; `neighbors`, `tag` and `filter` choose among them; `export` writes them.",
)

Out = Annotated[Path, typer.Argument(help="The folder of the run.", show_default=False)]
ModelName = Annotated[
    str, typer.Option("--model", help="smollm2, a folder, a hub id, or the name at the servers.", show_default=False)
]
Engine = Annotated[str, typer.Option(help="openvino, transformers, server or ray.")]
Servers = Annotated[
    list[str] | None, typer.Option("--server", help="Address of a completions endpoint, up to /v1; may be repeated.")
]
DialectOption = Annotated[str, typer.Option(help="What the servers are: vllm, llama.cpp or openai.")]
ApiKeyEnv = Annotated[str | None, typer.Option(help="Variable that holds the servers' key.")]
Concurrency = Annotated[int, typer.Option(help="Requests under way at each server.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or hub id of the tokenizer, where it is not the model's.")]
Workers = Annotated[int, typer.Option(help="With ray: how many copies of the model.")]
WorkerEngine = Annotated[str, typer.Option(help="With ray: openvino or transformers.")]
System = Annotated[
    str, typer.Option(help="template, none, math, code, translation, or a system text for the instruction step.")
]
TemplateArg = Annotated[
    list[str] | None, typer.Option("--template-arg", help="NAME=VALUE (JSON) for the chat template; may be repeated.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="A .jsonl or .parquet file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def main() -> None:
    """Entry point. Exit status 0: done; 2: wrong use, bad input or a model that failed; 130: interrupted (the same command goes on)."""
    app()


@app.command()
def template(
    tokenizer: Annotated[str, typer.Argument(help="smollm2, or a tokenizer's folder or hub id.", show_default=False)],
    system: System = "template",
    template_arg: TemplateArg = None,
    as_json: AsJson = False,
) -> None:
    """Show what a chat template puts around a user's text, and the tokens that the first step sends."""
    with _one_line_errors():
        source = ModelSpec(model=tokenizer, tokenizer=tokenizer).tokenizer_source()
        transformers: Any = import_extra("transformers", "magpie-synth[server]")
        loaded = transformers.AutoTokenizer.from_pretrained(source)
        text = DOMAINS.get(system, system)
        found = derive_template(loaded, system=text, name=tokenizer, **_pairs(template_arg))
    if as_json:
        _print_json(asdict(found))
    else:
        print(found.explain())


@app.command()
def generate(
    out: Out,
    model: ModelName,
    engine: Engine = "transformers",
    server: Servers = None,
    dialect: DialectOption = "vllm",
    api_key_env: ApiKeyEnv = None,
    concurrency: Concurrency = 64,
    tokenizer: Tokenizer = None,
    workers: Workers = 2,
    worker_engine: WorkerEngine = "transformers",
    batch_size: Annotated[int | None, typer.Option(help="Rows at once, for models in this process.")] = None,
    precision: Annotated[str, typer.Option(help="With openvino: float32, int8 or int4.")] = "float32",
    rows: Annotated[int | None, typer.Option(help="Instructions to draw, at temperature 1.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Instead of --rows: TEMPERATURE:TOP_P:ROWS with commas between, or air or pro, the paper's."),
    ] = None,
    responses: Annotated[
        int | None, typer.Option(help="Answer the first so many that are worth it. [default: all]")
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    system: System = "template",
    systems: Annotated[
        Path | None, typer.Option(help='JSON file of several system texts: {"key": ["text", weight], ...}.')
    ] = None,
    language: Annotated[str | None, typer.Option(help="Language code, such as de.")] = None,
    prepend_system: Annotated[
        bool, typer.Option("--prepend-system", help="Put a system text that the template refuses before the user's.")
    ] = False,
    template_arg: TemplateArg = None,
    max_instruction_tokens: Annotated[int, typer.Option(help="Longest instruction.")] = 2048,
    max_response_tokens: Annotated[int, typer.Option(help="Longest response.")] = 4096,
    temperature: Annotated[float, typer.Option(help="Of the responses; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the responses.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Of the responses.")] = 1.0,
    system_in_response: Annotated[
        bool, typer.Option("--system-in-response", help="Also answer under the system text.")
    ] = False,
    stop_at_newline: Annotated[
        bool, typer.Option("--stop-at-newline", help="End instructions at the first line.")
    ] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Take list numbers and answers off instructions.")
    ] = False,
    suppress_first: Annotated[
        list[str] | None, typer.Option(help="What no instruction may begin with; may be repeated.")
    ] = None,
    first_token_temperature: Annotated[
        float, typer.Option(help="What the temperature of the first token is multiplied by.")
    ] = 1.0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop if the first 32 rows mostly come to nothing.")] = False,
    force_new: Annotated[
        bool, typer.Option("--force-new", help="Put aside a run in this folder that was begun otherwise.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the prompts and the work; draw nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw instructions and answer them. Killed at any moment, the same command goes on."""
    with _one_line_errors():
        spec = ModelSpec(
            model=model,
            engine=engine,
            servers=tuple(server or ()),
            dialect=dialect,
            api_key_env=api_key_env,
            concurrency=concurrency,
            tokenizer=tokenizer,
            workers=workers,
            worker_engine=worker_engine,
            batch_size=batch_size,
            precision=precision,
        )
        cells = _cells(rows, schedule)
        options = {
            "seed": seed,
            "system": system,
            "systems": None if systems is None else json.loads(systems.read_text(encoding="utf-8")),
            "language": language,
            "system_fallback": "prepend" if prepend_system else None,
            "instruction": asdict(
                InstructionSettings(
                    max_tokens=max_instruction_tokens,
                    stop_at_newline=stop_at_newline,
                    sanitize=sanitize,
                    suppress_first=tuple(suppress_first or ()),
                    first_token_temperature=first_token_temperature,
                )
            ),
            "response": asdict(
                ResponseSettings(
                    max_tokens=max_response_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    repetition_penalty=repetition_penalty,
                    system_in_response=system_in_response,
                )
            ),
            "template_kwargs": _pairs(template_arg),
        }
        config = {
            "model": spec.to_dict(),
            "options": options,
            "schedule": cells,
            "responses": responses,
            "turns": turns,
        }
        magpie = _magpie(config)
        if dry_run:
            _print_json(
                {
                    "instructions": sum(cell[2] for cell in cells),
                    "responses": responses,
                    "turns": turns,
                    "prompts": {key: found.pre_query for key, found in magpie.templates.items()},
                    "suppressed_first_tokens": magpie.suppressed,
                }
            )
            return
        run = magpie.run(out, schedule=cells, responses=responses, turns=turns, strict=strict, force_new=force_new)
        _keep_config(out, config)
        _report(run, as_json)


@app.command()
def respond(
    out: Out,
    responses: Annotated[int | None, typer.Option(help="Answer the first so many. [default: all]")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer more of a run's instructions, as `generate` was told to."""
    with _one_line_errors():
        _report(_again(out, responses=responses), as_json)


@app.command()
def extend(
    out: Out, turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 2, as_json: AsJson = False
) -> None:
    """Add turns to the conversations of a run."""
    with _one_line_errors():
        _report(_again(out, turns=turns), as_json)


@app.command()
def tag(
    out: Out,
    kind: Annotated[str, typer.Option(help="difficulty, quality, category, safety, language or reward.")],
    model: Annotated[
        str | None, typer.Option(help="The judge: as for generate; for reward a classifier's folder.")
    ] = None,
    engine: Engine = "transformers",
    server: Servers = None,
    dialect: DialectOption = "vllm",
    api_key_env: ApiKeyEnv = None,
    languages: Annotated[str | None, typer.Option(help="For language: codes to choose among, with commas.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out about rows, and keep it with them. Rows that have the tag are left alone."""
    with _one_line_errors():
        check_choice("kind", kind, (*tagging.KINDS, "safety", "language", "reward"))
        run = Run(out)
        done = run.tagged(kind)
        rows = [row for row in run if row["id"] not in done]

        def keep(found: Any) -> None:
            run.put_tags(kind, found)

        if kind == "language":
            codes = None if languages is None else languages.split(",")
            made = tagging.tag_language(rows, languages=codes)
            keep({row["id"]: {"language": row["language"]} for row in made})
        elif model is None:
            raise ValueError(f"--model is needed to tag {kind}: the judge")
        elif kind == "reward":
            made = tagging.tag_reward(rows, _scorer(model), name=model)
            keep({row["id"]: {name: row[name] for name in ("instruct_reward", "reward_model")} for row in made})
        else:
            judge = ModelSpec(
                model=model, engine=engine, servers=tuple(server or ()), dialect=dialect, api_key_env=api_key_env
            ).build()
            made = tagging.tag(rows, kind, judge, store=keep)  # type: ignore[arg-type]  # every model chats
        failed = sum(row.get(f"{kind}_error") is not None for row in made)
    _say({"tagged": len(made), "failed": failed, "had_it": len(done)}, as_json)


@app.command()
def neighbors(
    out: Out,
    embed: Annotated[
        str, typer.Option(help="minilm, or the folder or hub id of a sentence-transformers model.")
    ] = "minilm",
    threshold: Annotated[float, typer.Option(help="Squared distance below which a row repeats another.")] = 0.05,
    dedupe: Annotated[str, typer.Option(help="official: any earlier row counts; greedy: kept ones only.")] = "official",
    as_json: AsJson = False,
) -> None:
    """Measure each instruction's distance to its nearest neighbour, among all rows."""
    with _one_line_errors():
        run = Run(out)
        embedder = SentenceEmbedder.minilm() if embed == "minilm" else SentenceEmbedder(embed)
        made = annotate_neighbors(list(run), embedder=embedder, threshold=threshold, dedupe=dedupe)
        names = ("min_neighbor_distance", "repeat_count", "min_similar_id")
        run.put_tags("neighbors", {row["id"]: {name: row[name] for name in names} for row in made})
        repeats = sum(row["min_similar_id"] not in (None, row["id"]) for row in made)
    _say({"rows": len(made), "repeating_an_earlier_row": repeats}, as_json)


@app.command(name="filter")
def filter_rows(
    out: Out,
    output: Output,
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(filters.PRESETS)}.")] = "dedupe",
    top: Annotated[int | None, typer.Option(help="Keep so many with the longest responses.")] = None,
    tau: Annotated[float | None, typer.Option(help="The lowest reward.")] = None,
    missing: Annotated[
        str, typer.Option(help="Tags that no row has: error, skip-filter (leave those rules out) or drop (the rows).")
    ] = "error",
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "rows",
    as_json: AsJson = False,
) -> None:
    """Write the rows that pass a filter."""
    with _one_line_errors():
        check_choice("--format", format, FORMATS)
        rows = list(Run(out))
        kept = filters.apply(rows, preset, missing=missing, top=top, tau=tau)
        write_rows((FORMATS[format](row) for row in kept), output)
    _say({"rows": len(rows), "kept": len(kept)}, as_json)


@app.command()
def prefer(
    out: Out,
    output: Output,
    reward: Annotated[
        str, typer.Option(help="The reward model: folder or hub id of a sequence classifier.", show_default=False)
    ],
    k: Annotated[int, typer.Option(help="Responses to each instruction.")] = 5,
    temperature: Annotated[float, typer.Option(help="Of the responses.")] = 0.8,
    test_share: Annotated[float, typer.Option(help="Share of rows for the test split.")] = 0.02,
    as_json: AsJson = False,
) -> None:
    """Draw k responses to each instruction, score them, and write the best against the worst for TRL."""
    with _one_line_errors():
        scorer = _scorer(reward)
        run = _magpie(_config(out)).run_preferences(out, k=k, temperature=temperature)
        made = run.preferences(scorer, test_share=test_share)
        write_rows(made, output)
    _say({"pairs": len(made), "rows": len(run.rows())}, as_json)


@app.command()
def export(
    out: Out,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A .jsonl or .parquet file, or with --shard a folder.", show_default=False),
    ],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "trl",
    shard: Annotated[int | None, typer.Option(help="Write Parquet files of so many rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write all rows of a run."""
    with _one_line_errors():
        check_choice("--format", format, FORMATS)
        rows = [FORMATS[format](row) for row in Run(out)]
        files = 1
        if shard is None:
            write_rows(rows, output)
        else:
            files = len(write_shards(rows, output, size=shard))
    _say({"rows": len(rows), "files": files}, as_json)


@app.command()
def card(
    out: Out,
    folder: Annotated[Path | None, typer.Option(help="Where to. [default: card, in the run's folder]")] = None,
    title: Annotated[str, typer.Option(help="Title of the card.")] = "Magpie data",
    licence: Annotated[str, typer.Option(help="Licence of the data; the model's own may bind you.")] = "other",
) -> None:
    """Write a dataset card with statistics and plots."""
    with _one_line_errors():
        print(cards.write_card(Run(out), folder, title=title, licence=licence))


@app.command()
def stats(out: Out, as_json: AsJson = False) -> None:
    """Show what was drawn, dropped and kept so far; also while the run goes on."""
    with _one_line_errors():
        _report(Run(out), as_json)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    def show(message: Any, *_: Any, **__: Any) -> None:
        print(f"magpie-synth: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        try:
            yield
        except KeyboardInterrupt:
            print("magpie-synth: interrupted; the same command goes on where it was", file=sys.stderr)
            raise typer.Exit(130) from None
        except (
            ValueError,
            ImportError,
            OSError,
            LanguageModelError,
            SettingsMismatchError,
            StoreLockedError,
        ) as error:
            print(f"magpie-synth: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None


def _cells(rows: int | None, schedule: str | None) -> list[tuple[float, float, int]]:
    if (rows is None) == (schedule is None):
        raise ValueError("give --rows or --schedule")
    if schedule is None:
        return [(1.0, 1.0, int(rows or 0))]
    if schedule in ("air", "pro"):
        return list(AIR if schedule == "air" else PRO)
    try:
        parts = [part.split(":") for part in schedule.split(",")]
        return [(float(temperature), float(top_p), int(count)) for temperature, top_p, count in parts]
    except ValueError:
        raise ValueError(
            f"--schedule must be TEMPERATURE:TOP_P:ROWS with commas between, air or pro, got {schedule!r}"
        ) from None


def _pairs(entries: list[str] | None) -> dict[str, Any]:
    found = {}
    for entry in entries or ():
        name, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"--template-arg must be NAME=VALUE, got {entry!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _magpie(config: dict[str, Any]) -> Magpie:
    spec, options = ModelSpec.of(config["model"]), dict(config["options"])
    instruction, response = options.pop("instruction"), options.pop("response")
    instruction = {name: tuple(value) if isinstance(value, list) else value for name, value in instruction.items()}
    if options["systems"] is not None:
        options["systems"] = {
            key: value if isinstance(value, str) else (str(value[0]), float(value[1]))
            for key, value in options["systems"].items()
        }
    return Magpie(
        spec.build(),
        tokenizer=spec.tokenizer_source(),
        instruction=InstructionSettings(**instruction),
        response=ResponseSettings(**response),
        **options,
    )


def _keep_config(out: Path, config: dict[str, Any]) -> None:
    with atomic_write(out / "run.json") as file:
        json.dump(config, file, ensure_ascii=False, indent=1)


def _config(out: Path) -> dict[str, Any]:
    path = out / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"{out} holds no run.json: run `magpie-synth generate` there first")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _again(out: Path, **changes: Any) -> Run:
    config = {**_config(out), **changes}
    cells = [(float(t), float(p), int(n)) for t, p, n in config["schedule"]]
    run = _magpie(config).run(out, schedule=cells, responses=config["responses"], turns=config["turns"])
    _keep_config(out, config)
    return run


def _scorer(path: str) -> Scorer:
    return tagging.RewardModel.from_pretrained(path)


def _report(run: Run, as_json: bool) -> None:
    found = run.stats()
    if as_json:
        _print_json(found)
        return
    for name, value in found.items():
        if name != "by_cell":
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) or "none" if isinstance(value, dict) else value
            print(f"{name.replace('_', ' ')}: {shown}")


def _say(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(found)
    else:
        print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in found.items()))


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))
