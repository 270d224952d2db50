"""The command line. Results go to stdout, everything else to stderr; `--json` prints one JSON value and nothing else."""

from __future__ import annotations

import datetime
import io
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from chapbook_shared.report import Crash

from . import benchmarks, catalogue, demos, interpreters, release, scaffold
from .checks.run import Result, run_checks
from .terminal import print_json, say, stdout
from .workspace import Member, UsageError, Workspace, find_workspace, read

USAGE, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    help="List, try, create, check, benchmark and release the packages of the chapbook shelf.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # text in brackets is text
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Root = Annotated[
    Path | None, typer.Option("--root", help="The workspace; by default the one that the current folder lies in.")
]
STATUS_STYLE = {"holds": "green", "fails": "bold red", "not shown at this scale": "yellow"}


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # whatever the locale; what has no UTF-8 form is escaped as JSON does
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    # Ended from outside, it still ends what it started. What is ignored, as under nohup, stays so.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except UsageError as error:
        say(f"chapbook: {error}")
        sys.exit(USAGE)


@app.command("list")
def list_(
    json: Json = False,
    readme: Annotated[bool, typer.Option("--readme", help="Write the table into the README of the workspace.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if the table in the README of the workspace is out of date.")
    ] = False,
    root: Root = None,
) -> None:
    """Show what is on the shelf: package, method and paper, use, install line, version."""
    entries = catalogue.catalogue()
    if readme or check:
        file = find_workspace(root).root / "README.md"
        text = read(file)
        try:
            fresh = catalogue.with_catalogue(text, entries)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if fresh == text:
            say("the catalogue in README.md is up to date")
        elif check:
            say("the catalogue in README.md is out of date: run chapbook list --readme")
            raise typer.Exit(FAILED)
        else:
            file.write_text(fresh, encoding="utf-8")
            say("wrote the catalogue into README.md")
    elif json:
        print_json([asdict(entry) for entry in entries])
    else:
        table = Table("package", "method", "use", "paper", "install", "version")
        for entry in entries:
            paper = "\n".join(filter(None, [entry.paper, entry.paper_url]))
            cells = (entry.package, entry.method, entry.use, paper, entry.install, entry.version)
            table.add_row(*map(escape, cells))
        stdout().print(table)


@app.command("try")
def try_(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAMES]...", help="Packages to try.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Try every package of the shelf.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every demo; the same seed gives the same report.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write index.html into.")] = Path("report"),
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a demo is stopped.")] = 600,
    json: Json = False,
) -> None:
    """Run demos: each method against its baseline, on data that is there. Exits with 1 if a claim fails or a demo crashes.

    Every demo runs in a process of its own and makes claims before it measures. A claim holds, fails, or is
    "not shown at this scale" where the demo said beforehand that a run this small need not show it.
    """
    chosen = demos.choose(names or [], all_=all_)
    try:
        out.mkdir(parents=True, exist_ok=True)  # before minutes of work, not after
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made a folder: {error}") from None
    runs: list[demos.Run] = []
    interrupted = False
    try:
        for run in demos.run_demos(chosen, seed=seed, timeout=timeout, started=lambda name: say(f"trying {name} …")):
            say(f"{run.package}: {run.status} in {run.seconds:.0f} s")
            runs.append(run)
    except KeyboardInterrupt:
        interrupted = True
    page = demos.write_page(runs, out) if runs else None
    if json:
        print_json(
            {
                "seed": seed,
                "page": str(page) if page else None,
                "interrupted": interrupted,
                "packages": {run.package: run.to_dict() for run in runs},
            }
        )
    elif runs:
        stdout().print(claims_table(runs))
    if page:
        say(f"figures and details: {page}")
    for line in demos.verdicts(runs):
        say(line)
    if interrupted:
        say(f"interrupted: {len(chosen) - len(runs)} of {len(chosen)} demos did not run to their end")
        raise typer.Exit(INTERRUPTED)
    if any(run.status != "passed" for run in runs):
        raise typer.Exit(FAILED)


def claims_table(runs: Sequence[demos.Run]) -> Table:
    """One row a claim; package, method and baseline stand in the first row of each package alone."""
    table = Table(padding=(0, 1))
    table.add_column("package", no_wrap=True)
    for name, ratio in (("method", 3), ("baseline", 2), ("claim", 5), ("measured", 4)):
        table.add_column(name, overflow="fold", ratio=ratio)
    table.add_column("holds?", max_width=13)
    for run in runs:
        table.add_section()
        if isinstance(run.outcome, Crash):
            reason = run.outcome.reason.splitlines()[-1].strip()
            table.add_row(escape(run.package), "", "", "", escape(reason), "[bold red]crashed[/]")
            continue
        report = run.outcome
        whose = (report.package, report.method, report.baseline)
        for claim in report.claims:
            cells = (*whose, claim.claim, claim.measured)
            table.add_row(*map(escape, cells), f"[{STATUS_STYLE[claim.status]}]{claim.status}[/]")
            whose = ("", "", "")
    return table


@app.command("new")
def new(
    dist: Annotated[str, typer.Argument(help="Name of the distribution, such as topograph-loss.")], root: Root = None
) -> None:
    """Create packages/DIST with a small real method in it, ready to be replaced by yours. It passes check at once."""
    workspace = find_workspace(root)
    for path in scaffold.create(workspace, dist):
        say(f"wrote {path.relative_to(workspace.root)}")
    say(
        f"next: uv sync, then chapbook check {dist} and chapbook try {dist}; chapbook list --readme adds it to the catalogue"
    )


@app.command("check")
def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAMES]...", help="Distributions; all by default.")
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            help="Version to install the wheel on alone, such as 3.13, or all for those found here. May be repeated.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what builds wheels and installs them.")] = False,
    json: Json = False,
    root: Root = None,
) -> None:
    """Prove what a command can of a finished package. Exits with 1 if anything is amiss.

    Files, metadata, README and changelog; imports that are undeclared, forbidden or private; what importing loads; the
    wheel and what it holds; and the wheel alone in a fresh environment: import, every public name, every module, the
    code in the README, the commands, import time.
    """
    workspace = find_workspace(root)
    members = workspace.select(names or [])
    found = {} if quick else choose_interpreters(python or [])
    results: list[Result] = []
    for result in run_checks(
        workspace, members, interpreters=found, quick=quick, started=lambda what: say(f"{what} …")
    ):
        results.append(result)
    passed = all(result.passed for result in results)
    if json:
        print_json(
            {
                "passed": passed,
                "interpreters": {version: str(path) for version, path in found.items()},
                "packages": {member.dist: results_of(member, results) for member in members},
            }
        )
    else:
        table = Table("package", "check", "", "s", "what is wrong")
        for member in members:
            for result in (result for result in results if result.package == member.dist):
                verdict = "[green]pass[/]" if result.passed else "[bold red]FAIL[/]"
                reason = escape("\n".join(result.problems))
                table.add_row(escape(result.package), result.check, verdict, f"{result.seconds:.1f}", reason)
            table.add_section()
        stdout().print(table)
    wrong = sorted({result.package for result in results if not result.passed})
    say("every check passed" if passed else f"amiss: {', '.join(wrong)}")
    if not passed:
        raise typer.Exit(FAILED)


def results_of(member: Member, results: Sequence[Result]) -> list[dict[str, object]]:
    return [
        {
            "check": result.check,
            "passed": result.passed,
            "problems": result.problems,
            "seconds": round(result.seconds, 2),
        }
        for result in results
        if result.package == member.dist
    ]


def choose_interpreters(asked: Sequence[str]) -> dict[str, Path]:
    """Version -> interpreter. A version asked for by name must be there; of `all`, those are taken that are."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = list(dict.fromkeys(asked)) or [here]
    versions = list(interpreters.SUPPORTED) if "all" in wanted else wanted
    found: dict[str, Path] = {}
    for version in versions:
        if version not in interpreters.SUPPORTED:
            raise UsageError(f"--python must be one of {', '.join(interpreters.SUPPORTED)} or all, got {version!r}")
        interpreter = interpreters.find(version)
        if interpreter is not None:
            found[version] = interpreter
        elif version in wanted:
            raise UsageError(f"no Python {version} is installed here: install one, or leave out --python {version}")
        else:
            say(f"Python {version} is not installed here: nothing is checked on it")
    return found


@app.command("release")
def release_(
    dist: Annotated[str, typer.Argument(help="The distribution to release.")],
    bump: Annotated[release.Bump, typer.Option(help="Which number of the version goes up.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and do nothing.")] = False,
    root: Root = None,
) -> None:
    """Release one distribution: version, changelog heading, commit and tag DIST-vVERSION. Nothing is pushed.

    The changelog needs a section "## Unreleased" that says what users will notice. Other distributions are not touched.
    """
    workspace = find_workspace(root)
    plan = release.plan(workspace, workspace.find(dist), bump, today=datetime.date.today())
    verb = "would change" if dry_run else "changed"
    if not dry_run:
        release.carry_out(workspace, plan)
    say(f"{plan.dist} {plan.old} -> {plan.new}")
    say(f"{verb} {', '.join(release.changes(plan, workspace.root))}")
    for note in plan.notes:
        say(f"note: {note}")
    if not dry_run:
        say(f"committed and tagged; publish with: git push origin HEAD {plan.tag}")
    print(plan.tag)


@app.command("bench")
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAMES]...", help="Packages; all by default.")] = None,
    json: Json = False,
    root: Root = None,
) -> None:
    """Run the benchmarks and show ours next to the peer's, the ratio, and the goal. Exits with 1 if one crashes.

    A goal that is not met is shown as such and is no error: timings depend on the machine.
    """
    workspace = find_workspace(root)
    members = chosen_for_bench(workspace, names or [])
    done: list[benchmarks.Benchmark] = []
    try:
        for result in benchmarks.run_benchmarks(members, started=lambda what: say(f"{what} …")):
            done.append(result)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json([asdict(result) for result in done])
    else:
        stdout().print(bench_table(done))
    for result in done:
        if result.error:
            say(f"{result.package}: {result.script} {result.error}")
    if any(result.error for result in done):
        raise typer.Exit(FAILED)


def chosen_for_bench(workspace: Workspace, names: Sequence[str]) -> list[Member]:
    members = workspace.select(names)
    for member in members if names else []:
        if not benchmarks.scripts(member):
            raise UsageError(f"{member.dist} has no benchmarks/bench_*.py")
    return members


def bench_table(done: Sequence[benchmarks.Benchmark]) -> Table:
    table = Table("package", "workload", "ours", "peer", "ratio", "goal", "met?")
    for result in done:
        for row in result.rows:
            unit = row["unit"] or ""
            peer = "" if row["peer"] is None else f"{row['peer']:.4g} {unit} ({row['peer_name']})"
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            sign, of = ("<=", f" {unit}") if row["ratio"] is None else (">=", "")
            goal = "" if row["goal"] is None else f"{sign} {row['goal']:g}{of}"
            met = {None: "", True: "[green]yes[/]", False: "[yellow]no[/]"}[row["met"]]
            cells = (result.package, row["workload"], f"{row['ours']:.4g} {unit}", peer, ratio, goal)
            table.add_row(*map(escape, cells), met)
        if result.error:
            table.add_row(
                escape(result.package),
                escape(f"{result.script} {result.error}"),
                "",
                "",
                "",
                "",
                "[bold red]crashed[/]",
            )
    return table
