"""A result file as a page: HTML in one file, or Markdown with its figures next to it. Needs `mmd-equality[plot]` for the figures."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chapbook_shared.validate import check_choice, import_extra

__all__ = ["load_result", "render_html", "render_markdown"]

Table = tuple[str, list[str], list[list[str]]]
"""Title, head, rows."""

_VERDICT = {
    "different": "Different: equality is rejected.",
    "same-not-rejected": "Not rejected: no difference was found at this sample size. This does not show that there is none.",
    "inconclusive": "Inconclusive: no answer should be read from this sample.",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --soft: #f1f3f5; --line: #d0d4d9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16181b; --soft: #23272b; --line: #3b4046; } }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } .verdict { font-weight: 600; font-size: 1.1rem; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem; max-width: 62rem; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
img { max-width: 100%; background: #fff; border-radius: 4px; } .note { background: var(--soft); padding: .4rem .8rem; border-radius: 4px; }
"""


def load_result(path: str | Path) -> dict[str, Any]:
    """Read what `mmd-equality test`, `audit` or `plan` wrote."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("kind") not in ("test", "audit", "plan"):
        raise ValueError(f"{path} was not written by mmd-equality test, audit or plan")
    return document


def _figures(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, caption and matplotlib figure of everything worth seeing."""
    if document["kind"] == "plan":
        yield (
            "power",
            "Power against completions a prompt (bars: 95% interval; open points are scaled, not simulated)",
            _power(document),
        )
        return
    for number, (label, result) in enumerate(_results(document), 1):
        # The number keeps apart what differs only in letters a file name cannot hold.
        slug = f"{number}-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in label).strip("-")[:60]
        yield f"null-{slug}", f"{label}: null distribution, critical value and observed statistic", _null(result)
        if sum(e["mmd2"] is not None for e in result["per_prompt"]) > 1:
            yield f"prompts-{slug}", f"{label}: MMD² of each prompt", _prompts(result)
        yield f"power-{slug}", f"{label}: power of a test of this size against a true MMD²", _power_of_effect(result)


def _results(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if document["kind"] == "test":
        yield "test", document
        return
    for row in document["rows"]:
        for reference, result in row["results"].items():
            yield f"{row['endpoint']} / {row['task']} against {reference}", result


def _axes(width: float = 6.4, height: float = 3.2) -> tuple[Any, Any]:
    figure_class = import_extra("matplotlib.figure", "mmd-equality[plot]").Figure
    figure = figure_class(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _null(result: Mapping[str, Any]) -> Any:
    figure, axes = _axes()
    draws = [v for v in result["null_distribution"] if v is not None]
    axes.hist(draws, bins=min(60, max(10, len(draws) // 20)), color="#9db4c8", label="if nothing differed")
    if result["critical_value"] is not None:
        axes.axvline(result["critical_value"], color="#555", linestyle="--", label=f"critical at {result['alpha']:g}")
    axes.axvline(result["statistic"], color="#c0392b", linewidth=2, label=f"observed, p = {result['pvalue']:.3g}")
    axes.set(xlabel="MMD²" if result["statistic_name"] == "mmd" else result["statistic_name"], ylabel="draws")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _prompts(result: Mapping[str, Any]) -> Any:
    effects = sorted((e for e in result["per_prompt"] if e["mmd2"] is not None), key=lambda e: e["mmd2"])[-40:]
    figure, axes = _axes(height=max(2.0, 0.28 * len(effects) + 0.9))
    colors = ["#c0392b" if e["pvalue"] is not None and e["pvalue"] <= result["alpha"] else "#9db4c8" for e in effects]
    axes.barh([str(e["prompt_id"])[:32] for e in effects], [e["mmd2"] for e in effects], color=colors)
    axes.axvline(0, color="#555", linewidth=0.8)
    axes.set(xlabel=f"MMD² (red: p <= {result['alpha']:g} for this prompt alone, not corrected)")
    return figure


def _power_of_effect(result: Mapping[str, Any]) -> Any:
    from scipy.special import ndtr

    figure, axes = _axes(height=2.8)
    spread, critical = result["null_standard_deviation"] or 1e-12, result["critical_value"] or 0.0
    top = max(critical + 4 * spread, result["statistic"] * 1.2)
    effects = [top * i / 200 for i in range(201)]
    axes.plot(effects, [float(ndtr((e - critical) / spread)) for e in effects], color="#2c6e91")
    axes.axvline(result["statistic"], color="#c0392b", linewidth=1, label="observed")
    axes.axhline(0.8, color="#999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="true MMD²", ylabel="power (normal approximation)", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=9)
    return figure


def _power(document: Mapping[str, Any]) -> Any:
    figure, axes = _axes()
    rows = document["rows"]
    axes.plot([r["n"] for r in rows], [r["power"] for r in rows], color="#2c6e91", zorder=1)
    for row in rows:
        if row["power_ci"] is not None:
            axes.vlines(row["n"], *row["power_ci"], color="#2c6e91", alpha=0.5)
        fill = "#2c6e91" if row["simulated"] else "white"
        axes.scatter([row["n"]], [row["power"]], color=fill, edgecolor="#2c6e91", zorder=2)
    axes.axhline(document["power"], color="#999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="completions a prompt, on each side", ylabel="power", ylim=(0, 1.02), xticks=[r["n"] for r in rows])
    return figure


def _tables(document: Mapping[str, Any]) -> Iterator[Table]:
    if document["kind"] == "plan":
        head = [
            "n a prompt",
            "power",
            "95% interval",
            "detectable MMD²",
            "requests",
            "tokens in",
            "tokens out",
            "cost",
            "how",
        ]
        body = [
            [
                str(r["n"]),
                f"{r['power']:.2f}",
                "-" if r["power_ci"] is None else "{:.2f} to {:.2f}".format(*r["power_ci"]),
                f"{r['detectable']:.5f}",
                str(r["requests"]),
                f"{r['prompt_tokens']:.0f}",
                f"{r['completion_tokens']:.0f}",
                "-" if r["cost"] is None else f"{r['cost']:.4f}",
                "simulated" if r["simulated"] else "scaled",
            ]
            for r in document["rows"]
        ]
        yield "Sizes", head, body
        return
    if document["kind"] == "audit":
        head = [
            "endpoint",
            "verdict",
            "task",
            "against",
            "MMD²",
            "interval",
            "p",
            f"p ({document['correction']})",
            "power",
            "failed",
        ]
        body = []
        for row in document["rows"]:
            interval = "-" if row["ci"] is None else "{:.4f} to {:.4f}".format(*row["ci"])
            power = "-" if row["power"] is None else f"{row['power']:.2f}"
            body.append(
                [
                    row["endpoint"], row["verdict"], row["task"], " + ".join(row["references"]), f"{row['effect']:.5f}", interval,
                    f"{row['pvalue']:.4g}", f"{row['adjusted']:.4g}", power, f"{row['failure_rate']:.1%}",
                ]
            )  # fmt: skip
        yield "Verdicts", head, body
    for label, result in _results(document):
        body = [
            [
                str(e["prompt_id"]),
                f"{e['n_x']} + {e['n_y']}",
                "-" if e["mmd2"] is None else f"{e['mmd2']:.5f}",
                "-" if e["pvalue"] is None else f"{e['pvalue']:.4g}",
            ]
            for e in result["per_prompt"]
        ]
        yield f"Prompts: {label}", ["prompt", "completions", "MMD²", "p (not corrected)"], body


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    if document["kind"] == "plan":
        yield (
            f"Pilot MMD² = {document['effect']:.5f} over {document['prompts']} prompts; level {document['alpha']:g}. "
            + (
                f"{document['recommended']} completions a prompt reach power {document['power']:g}."
                if document["recommended"] is not None
                else f"No size in the grid reaches power {document['power']:g}."
            )
        )
        return
    verdict = document.get("verdict")
    if verdict:
        yield _VERDICT[verdict]
    if document["kind"] == "test":
        interval = document["ci"]
        shown = (
            "" if interval is None else f", {document['ci_level']:.0%} interval {interval[0]:.5f} to {interval[1]:.5f}"
        )
        name = "MMD²" if document["statistic_name"] == "mmd" else document["statistic_name"]
        yield f"{name} = {document['statistic']:.6g}{shown}; p = {document['pvalue']:.4g} at level {document['alpha']:g}."
        yield (
            f"{document['n_x']} + {document['n_y']} completions, kernel {document['kernel']}, normalisation "
            f"{document['normalization']}, {document['level']} level, length {document['max_length']}, "
            f"{document['null']} null with {document['n_draws']} draws, strata {document['strata']}."
        )
    else:
        yield (
            f"Level {document['alpha']:g} over all lines, correction {document['correction']}, composite null: "
            f"{document['composite']}, repeats: {document['repeats']}."
        )


def _cautions(document: Mapping[str, Any]) -> Iterator[str]:
    if document["kind"] == "test":
        for caution in document["warnings"]:
            yield f"{caution['code']}: {caution['message']}"
    for row in document.get("rows", []) if document["kind"] == "audit" else []:
        for caution in row["cautions"]:
            yield f"{row['endpoint']} / {row['task']}: {caution['code']}: {caution['message']}"


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def render_html(document: Mapping[str, Any]) -> str:
    """One HTML page with everything inside, the answer first; text from the samples is escaped."""
    check_choice("kind", document.get("kind"), ("test", "audit", "plan"))
    out = ["<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Model equality</title>"]
    out.append("<meta name='viewport' content='width=device-width, initial-scale=1'>")
    out.append(f"<style>{_STYLE}</style></head><body><h1>Model equality: {document['kind']}</h1>")
    first, *lines = _lines(document)
    out += [f"<p class='verdict'>{html.escape(first)}</p>", *(f"<p>{html.escape(line)}</p>" for line in lines)]
    out += [f"<p class='note'>{html.escape(line)}</p>" for line in _cautions(document)]
    answer, details = _answer_and_details(document)
    out += [_html_table(*table) for table in answer]
    for _, caption, figure in _figures(document):
        data = base64.b64encode(_svg(figure)).decode("ascii")
        text = html.escape(caption, quote=True)
        out.append(f"<h2>{text}</h2><img alt=\"{text}\" src='data:image/svg+xml;base64,{data}'>")
    out += [_html_table(*table) for table in details]
    return "\n".join([*out, "</body></html>\n"])


def _answer_and_details(document: Mapping[str, Any]) -> tuple[list[Table], list[Table]]:
    """The table that answers the question goes above the figures; those by prompt below."""
    tables = list(_tables(document))
    first = 0 if document["kind"] == "test" else 1
    return tables[:first], tables[first:]


def _html_table(title: str, head: list[str], body: list[list[str]]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
    return f"<h2>{html.escape(title)}</h2><div class='wide'><table><tr>{cells}</tr>{rows}</table></div>"


def render_markdown(document: Mapping[str, Any], *, figures: Path | None = None) -> str:
    """Markdown. With `figures`, a folder, the plots are written there as SVG and linked by relative path."""
    check_choice("kind", document.get("kind"), ("test", "audit", "plan"))
    out = [f"# Model equality: {document['kind']}", *_lines(document)]
    out += [f"> {_md(line)}" for line in _cautions(document)]
    answer, details = _answer_and_details(document)
    out += [_md_table(*table) for table in answer]
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for name, caption, figure in _figures(document):
            (figures / f"{name}.svg").write_bytes(_svg(figure))
            out.append(f"![{_md(caption)}]({figures.name}/{name}.svg)")
    out += [_md_table(*table) for table in details]
    return "\n\n".join(out) + "\n"


def _md_table(title: str, head: list[str], body: list[list[str]]) -> str:
    rows = ["| " + " | ".join(map(_md, row)) + " |" for row in (head, ["---"] * len(head), *body)]
    return f"## {_md(title)}\n\n" + "\n".join(rows)


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
