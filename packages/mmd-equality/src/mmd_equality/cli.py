"""The command `mmd-equality`: sample, test, audit, plan, report.

Exit codes: 0 done, or equality not rejected; 1 equality rejected; 2 wrong use or bad input; 3 inconclusive.
Results go to stdout or files, progress and warnings to stderr.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app", "main"]

EXIT = {"same-not-rejected": 0, "different": 1, "inconclusive": 3}
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Kernel = Annotated[str, typer.Option(help="hamming, all_substrings, kspectrum, kspectrum<k> or onehot.")]
Json = Annotated[str | None, typer.Option("--json", help="Write the result as JSON to this file; - means stdout.")]
MaxLength = Annotated[int | None, typer.Option(help="Cut both sides to so many characters or tokens.")]
Level = Annotated[str | None, typer.Option(help="char or token; token needs token_ids in both files.")]


def _plain_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """One clear line and exit code 2 for what a user can put right."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError, but how a verdict leaves
            raise
        except (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped; what was finished is kept, run the same command to go on", err=True)
            raise typer.Exit(130) from None

    return run


def _emit(text: str, document: dict[str, Any], target: str | None) -> None:
    from chapbook_shared.jobs import atomic_write

    body = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False)
    if target == "-":
        typer.echo(body)
        return
    typer.echo(text)
    if target is not None:
        with atomic_write(target) as file:
            file.write(body + "\n")


def _check_target(target: str | Path | None) -> None:
    """Before any work: whether the result can be written."""
    if target not in (None, "-") and (Path(target).is_dir() or not Path(target).absolute().parent.is_dir()):
        raise ValueError(f"cannot write {target}: it must be a file in a folder that exists")


@app.command()
@_plain_errors
def sample(
    prompts: Annotated[str, typer.Option(help="JSON-lines file, or continuations, code, questions.")],
    out: Annotated[Path, typer.Option(help="JSON-lines file to write; a store next to it lets the run resume.")],
    n: Annotated[int, typer.Option(help="Completions of each prompt.")] = 10,
    endpoint: Annotated[str | None, typer.Option(help="Base URL of an OpenAI-compatible server, up to /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    local: Annotated[str | None, typer.Option(help="Folder or hub name of a transformers model to run here.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="GGUF file to run here with llama.cpp.")] = None,
    verb: Annotated[str, typer.Option(help="chat (the model's template) or complete (raw text).")] = "chat",
    max_tokens: Annotated[int, typer.Option(help="Longest completion, in tokens.")] = 50,
    temperature: Annotated[float, typer.Option(help="1 samples from the model's own distribution.")] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    dialect: Annotated[
        str, typer.Option(help="openai, vllm or llama.cpp: which further fields the server takes.")
    ] = "openai",
    concurrency: Annotated[int, typer.Option(help="Requests under way.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds for one try.")] = 120.0,
    threads: Annotated[int | None, typer.Option(help="Threads of llama.cpp; default: all cores.")] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again for what is recorded as failed.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(help="Tokenizer (folder or hub name) whose chat template should give the reported prompt length."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop if the served model's name changes.")] = False,
    seed: Seed = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be asked, and ask nothing.")] = False,
    json_out: Json = None,
) -> None:
    """Draw completions from a server or a local model. Run again to resume: never more than n of a prompt."""
    from chapbook_shared.lm import Sampling
    from chapbook_shared.validate import check_int
    from mmd_equality import sampling as collect

    chosen = [x is not None for x in (endpoint, local, gguf)]
    check_int("n", n, minimum=1)
    _check_target(json_out)
    if sum(chosen) != 1:
        raise ValueError("name one source: --endpoint URL --model NAME, or --local MODEL, or --gguf FILE")
    items = collect.load_prompts(prompts)
    if dry_run:
        characters = sum(len(p.text or json.dumps(p.messages)) for p in items)
        document = {
            "kind": "dry-run", "prompts": len(items), "requests": len(items) * n,
            "prompt_tokens_estimate": n * characters // 4, "completion_tokens_at_most": len(items) * n * max_tokens,
        }  # fmt: skip
        text = (
            f"{document['requests']} requests ({len(items)} prompts x {n}), about {document['prompt_tokens_estimate']} prompt "
            f"tokens, at most {document['completion_tokens_at_most']} completion tokens"
        )
        _emit(text, document, json_out)
        return
    source: Any
    if endpoint is not None:
        if model is None:
            raise ValueError("--endpoint needs --model, the name that the server serves")
        settings: dict[str, Any] = {
            "api_key_env": api_key_env,
            "dialect": dialect,
            "concurrency": concurrency,
            "timeout": timeout,
        }
        source = nullcontext(collect.OpenAICompatible(endpoint, model, **settings))
    elif gguf is not None:
        source = collect.LlamaCpp(gguf, threads=threads, concurrency=concurrency, timeout=timeout)
    else:
        source = nullcontext(collect.Transformers(local))
    wanted = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    options: dict[str, Any] = {"verb": verb, "seed": seed, "retry_failed": retry_failed, "strict": strict}
    if template is not None:
        from chapbook_shared.validate import import_extra

        tokenizer = import_extra("transformers", "mmd-equality[local]").AutoTokenizer.from_pretrained(template)
        options["expected_prompt_tokens"] = collect.template_tokens(tokenizer)
    with source as ready:
        done = collect.sample(
            ready, items, n=n, out=out, sampling=wanted, concurrency=concurrency if local is None else 4096, **options
        )
    for warning in done.warnings:
        typer.echo(f"warning: {warning}", err=True)
    document = {
        "kind": "sample", "path": str(done.path), "completions": len(done.samples), "requested": done.requested,
        "failed": done.failed, "settings_hash": done.settings_hash, "warnings": list(done.warnings),
    }  # fmt: skip
    text = (
        f"{len(done.samples)} completions in {done.path} ({done.requested} asked for now, {done.failed} failed in all)"
    )
    _emit(text, document, json_out)


@app.command("test")
@_plain_errors
def compare(
    reference: Annotated[Path, typer.Argument(help="JSON lines with prompt_id and completion.")],
    endpoint: Annotated[Path, typer.Argument(help="JSON lines of the side under test.")],
    alpha: Annotated[float, typer.Option(help="Level of the test.")] = 0.01,
    kernel: Kernel = "hamming",
    normalization: Annotated[str, typer.Option(help="pairs, paper or per_prompt.")] = "pairs",
    permutations: Annotated[int, typer.Option(help="Number of permutations.")] = 9999,
    max_length: MaxLength = None,
    level: Level = None,
    normalize: Annotated[str | None, typer.Option(help="Unicode form for both sides: NFC, NFD, NFKC, NFKD.")] = None,
    on_small: Annotated[str, typer.Option(help="error or drop prompts with fewer than 2 completions.")] = "error",
    on_missing: Annotated[str, typer.Option(help="error or drop prompts that one side lacks.")] = "error",
    failure_limit: Annotated[float, typer.Option(help="Inconclusive above this share of failed requests.")] = 0.02,
    min_effect: Annotated[float | None, typer.Option(help="An MMD^2 that must be detectable for a pass.")] = None,
    power_floor: Annotated[float, typer.Option(help="Inconclusive below this power against --min-effect.")] = 0.5,
    ledger: Annotated[Path | None, typer.Option(help="Remembers earlier looks; default: next to --json.")] = None,
    audit_id: Annotated[str | None, typer.Option(help="Counts every run under this name as a look.")] = None,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(help="Threads.")] = 1,
    json_out: Json = None,
) -> None:
    """Test one endpoint against one reference. Exit code 0: not rejected, 1: rejected, 3: inconclusive."""
    from mmd_equality import Samples, audit

    if _same_file(reference, endpoint):
        raise ValueError(f"{reference} and {endpoint} are the same file: a p-value would mean nothing")
    _check_target(json_out)
    if audit_id is not None and ledger is None and json_out in (None, "-"):
        raise ValueError("--audit-id needs a file to remember its looks in: --ledger FILE, or --json FILE")
    x, y = (Samples.from_jsonl(path, level=_level(level)) for path in (reference, endpoint))
    book = ledger
    if book is None and json_out not in (None, "-"):
        book = Path(f"{json_out}.ledger.json")
    drops: dict[str, Any] = {"on_small": on_small, "on_missing": on_missing, "normalize": normalize}
    report = audit(
        {"reference": x}, {"endpoint": y}, alpha=alpha, kernel=kernel, normalization=normalization, n_permutations=permutations,
        max_length=max_length, failure_limit=failure_limit, distortion=min_effect, power_floor=power_floor, audit_id=audit_id,
        ledger=book, random_state=seed, n_jobs=jobs, **drops,
    )  # fmt: skip
    (row,) = report.rows
    result = row.results["reference"]
    document = {
        "kind": "test", "verdict": row.verdict, **result.to_dict(), "power": row.power, "spent_alpha": row.spent_alpha,
        "samples": {"reference": {**x.meta, "failure_rate": x.failure_rate}, "endpoint": {**y.meta, "failure_rate": y.failure_rate}},
    }  # fmt: skip
    document["warnings"] = [vars(c) for c in row.cautions]
    lines = [line for line in result.summary().split("\n") if not line.startswith("warning: ")]
    lines += [f"warning: {caution}" for caution in row.cautions]
    _emit("\n".join([*lines, f"verdict: {row.verdict}"]), document, json_out)
    raise typer.Exit(EXIT[row.verdict])


def _same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _level(level: str | None) -> Any:
    if level not in (None, "char", "token"):
        raise ValueError(f"--level must be char or token, got {level!r}")
    return level


_AUDIT_KEYS = {
    "alpha", "correction", "composite", "repeats", "vote", "kernel", "normalization", "n_permutations", "max_length",
    "failure_limit", "power_floor", "audit_id", "on_small", "on_missing", "normalize", "random_state", "n_jobs",
}  # fmt: skip


@app.command()
@_plain_errors
def audit(
    config: Annotated[
        Path, typer.Argument(help="TOML: settings, and tables called references and endpoints; see the README.")
    ],
    seed: Annotated[int | None, typer.Option(help="Instead of the file's random_state.")] = None,
    json_out: Json = None,
) -> None:
    """Audit several endpoints at one level, as a TOML file says. Exit codes as for `test`."""
    from mmd_equality import Samples
    from mmd_equality import audit as run_audit

    try:
        settings = tomllib.loads(config.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{config} is not TOML: {error}") from None

    level = _level(settings.pop("level", None))
    if seed is not None:
        settings["random_state"] = seed

    def bags(section: Any, name: str) -> dict[str, Any]:
        if not isinstance(section, dict) or not section:
            raise ValueError(f"{config} needs a table [{name}] of name = file, or name = {{ task = file }}")

        def read(path: Any) -> Samples:
            if not isinstance(path, str):
                raise ValueError(f"{config}: [{name}] must name files, got {path!r}")
            return Samples.from_jsonl(config.parent / path, level=level)

        return {
            who: {task: read(path) for task, path in what.items()} if isinstance(what, dict) else read(what)
            for who, what in section.items()
        }

    references, endpoints = (bags(settings.pop(name, None), name) for name in ("references", "endpoints"))
    distortion = settings.pop("distortion", None)
    if isinstance(distortion, (str, dict)):
        distortion = bags({"distortion": distortion}, "distortion")["distortion"]
    out = settings.pop("out", None)
    target = json_out or (None if out is None else str(config.parent / str(out)))
    _check_target(target)
    book = str(settings.pop("ledger", None) or f"{config.stem}.ledger.json")
    unknown = sorted(set(settings) - _AUDIT_KEYS)
    if unknown:
        raise ValueError(f"{config}: unknown settings {', '.join(unknown)}; known: {', '.join(sorted(_AUDIT_KEYS))}")
    report = run_audit(references, endpoints, distortion=distortion, ledger=config.parent / book, **settings)
    _emit(f"{report.table()}\nverdict: {report.verdict}", report.to_dict(), target)
    raise typer.Exit(EXIT[report.verdict])


@app.command()
@_plain_errors
def plan(
    reference: Annotated[Path, typer.Argument(help="Pilot sample of the reference.")],
    alternative: Annotated[Path, typer.Argument(help="Pilot sample of what should be detected.")],
    grid: Annotated[str, typer.Option(help="Completions a prompt, comma separated.")] = "5,10,20,40",
    power: Annotated[float, typer.Option(help="The power wanted.")] = 0.8,
    alpha: Annotated[float, typer.Option(help="Level of the test.")] = 0.01,
    kernel: Kernel = "hamming",
    simulations: Annotated[int, typer.Option(help="Simulated tests for each size.")] = 200,
    permutations: Annotated[int, typer.Option(help="Permutations in each.")] = 199,
    max_length: MaxLength = None,
    level: Level = None,
    price_in: Annotated[float | None, typer.Option(help="Price of a million prompt tokens.")] = None,
    price_out: Annotated[float | None, typer.Option(help="Price of a million completion tokens.")] = None,
    seed: Seed = 0,
    json_out: Json = None,
) -> None:
    """How many completions a prompt are needed, what they can find, what they cost."""
    from mmd_equality import Samples
    from mmd_equality import plan as run_plan

    try:
        sizes = [int(part) for part in grid.split(",")]
    except ValueError:
        raise ValueError(f"--grid must be whole numbers with commas, got {grid!r}") from None
    x, y = (Samples.from_jsonl(path, level=_level(level)) for path in (reference, alternative))
    _check_target(json_out)
    price = None if price_in is None and price_out is None else (price_in or 0.0, price_out or 0.0)
    found = run_plan(
        x, y, grid=sizes, power=power, alpha=alpha, kernel=kernel, max_length=max_length, n_simulations=simulations,
        n_permutations=permutations, price_per_million=price, random_state=seed,
    )  # fmt: skip
    _emit(str(found), found.to_dict(), json_out)


@app.command()
@_plain_errors
def report(
    result: Annotated[Path, typer.Argument(help="JSON written by test, audit or plan.")],
    format: Annotated[str, typer.Option(help="html or md.")] = "html",
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: the result's name with .html or .md.")
    ] = None,
) -> None:
    """Turn a result into a page with its figures."""
    from chapbook_shared.jobs import atomic_write
    from mmd_equality.report import load_result, render_html, render_markdown

    if format not in ("html", "md"):
        raise ValueError(f"--format must be html or md, got {format!r}")
    document = load_result(result)
    target = out or result.with_suffix(f".{format}")
    _check_target(target)
    try:
        text = (
            render_html(document)
            if format == "html"
            else render_markdown(document, figures=target.with_name(f"{target.stem}_figures"))
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{result} is not a whole result of mmd-equality: {type(error).__name__}: {error}") from None
    with atomic_write(target) as file:
        file.write(text)
    typer.echo(str(target))


def main() -> None:
    """Entry point of the command."""
    app(prog_name="mmd-equality")


if __name__ == "__main__":
    main()
