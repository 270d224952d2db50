"""The command: exit codes, one-line errors, JSON, pages."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from chapbook_shared.lm import ScriptedModel, Server
from mmd_equality import Samples
from mmd_equality.cli import app
from mmd_equality.report import load_result, render_html, render_markdown


@pytest.fixture
def files(tmp_path, source):
    def text(samples):
        return Samples(samples.prompt_ids, ["".join("abcd"[t] for t in c) for c in samples.completions])

    made = {
        "ref": source(20, m=3, seed=1), "same": source(20, m=3, seed=2), "other": source(20, m=3, shift=0.9, seed=3),
        "tiny": source(3, m=1, seed=4), "tiny2": source(3, m=1, seed=5),
    }  # fmt: skip
    out = {}
    for name, bag in made.items():
        out[name] = str(tmp_path / f"{name}.jsonl")
        text(bag).to_jsonl(out[name])
    return out


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_exit_codes_say_the_verdict(files, tmp_path):
    assert run("test", files["ref"], files["same"]).exit_code == 0
    assert run("test", files["ref"], files["other"]).exit_code == 1
    assert run("test", files["ref"], tmp_path / "none.jsonl").exit_code == 2
    assert run("test", files["tiny"], files["tiny2"]).exit_code == 3


def test_errors_are_one_line(files):
    result = run("test", files["ref"], files["ref"])
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1
    assert run("test", files["ref"], files["same"], "--kernel", "nope").exit_code == 2
    assert run("test", files["ref"], files["same"], "--permutations", "5").exit_code == 2
    assert run("test").exit_code == 2


def test_json_to_a_file_and_to_stdout_and_the_pages(files, tmp_path):
    out = tmp_path / "out.json"
    run("test", files["ref"], files["other"], "--json", out)
    document = load_result(out)
    assert document["verdict"] == "different"
    assert json.loads(run("test", files["ref"], files["same"], "--json", "-").stdout)["verdict"] == "same-not-rejected"
    assert run("report", out).exit_code == 0
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml") == 3
    assert "http://" not in page.split("<body>")[1].replace("http://www.w3.org", "")
    assert run("report", out, "--format", "md").exit_code == 0
    markdown = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "| prompt |" in markdown
    assert len(list((tmp_path / "out_figures").glob("*.svg"))) == 3
    assert run("report", out, "--format", "pdf").exit_code == 2
    assert run("report", files["ref"]).exit_code == 2


def test_looking_again_at_a_grown_file_is_noticed(files, tmp_path, source):
    out = tmp_path / "out.json"
    assert run("test", files["ref"], files["same"], "--json", out).exit_code == 0
    assert run("test", files["ref"], files["same"], "--json", out).exit_code == 0
    assert "alpha-spent" not in out.read_text(encoding="utf-8")
    with open(files["same"], "a", encoding="utf-8") as grown, open(files["other"], encoding="utf-8") as more:
        grown.write(more.read() * 3)
    assert run("test", files["ref"], files["same"], "--json", out).exit_code == 3
    assert "alpha-spent" in out.read_text(encoding="utf-8")


def test_an_audit_from_toml(files, tmp_path):
    config = tmp_path / "audit.toml"
    config.write_text(
        'alpha = 0.01\ncorrection = "holm"\nout = "report.json"\n[references]\nfp32 = "ref.jsonl"\n'
        '[endpoints]\na = "same.jsonl"\nb = "other.jsonl"\n',
        encoding="utf-8",
    )
    result = run("audit", config)
    assert result.exit_code == 1
    assert "verdict: different" in result.output
    document = load_result(tmp_path / "report.json")
    assert [row["verdict"] for row in document["rows"]] == ["same-not-rejected", "different"]
    assert "fp32" in render_html(document)
    assert "| a |" in render_markdown(document)
    config.write_text("alhpa = 0.01\n" + config.read_text(encoding="utf-8"), encoding="utf-8")
    assert "unknown settings alhpa" in run("audit", config).output
    config.write_text("not toml", encoding="utf-8")
    assert run("audit", config).exit_code == 2


def test_a_plan_and_its_page(files, tmp_path):
    out = tmp_path / "plan.json"
    result = run(
        "plan",
        files["ref"],
        files["other"],
        "--grid",
        "3,10,50",
        "--simulations",
        "20",
        "--price-in",
        "1",
        "--json",
        out,
    )
    assert result.exit_code == 0, result.output
    assert "data:image/svg+xml" in render_html(load_result(out))
    assert run("plan", files["ref"], files["other"], "--grid", "x").exit_code == 2


def test_sampling_over_http_and_a_dry_run(tmp_path):
    out = tmp_path / "s.jsonl"
    with Server(ScriptedModel(chat=lambda messages, sampling: f"answer {sampling.seed}", name="m")) as server:
        options = ["--endpoint", server.base_url, "--model", "m", "--prompts", "questions", "--out", out, "--n", "2"]
        dry = run("sample", *options, "--dry-run")
        assert dry.exit_code == 0
        assert "40 requests (20 prompts x 2)" in dry.output
        assert server.asked == 0
        assert run("sample", *options).exit_code == 0
        assert run("sample", *options).exit_code == 0
        assert server.asked == 40
    assert set(Samples.from_jsonl(out).counts.values()) == {2}
    assert run("sample", "--prompts", "questions", "--out", out).exit_code == 2
    assert run("sample", "--prompts", "questions", "--out", out, "--endpoint", "http://127.0.0.1:9/v1").exit_code == 2


def test_text_from_samples_is_escaped_in_pages(tmp_path):
    x = Samples(["<script>|"] * 6, list("abcdef"))
    y = Samples(["<script>|"] * 6, list("ghijkl"))
    from mmd_equality import audit

    document = json.loads(audit({"r": x}, {"e": y}, n_permutations=999, alpha=0.05).to_json())
    assert "<script>" not in render_html(document)
    assert "<script>\\|" in render_markdown(document)


def test_importing_the_core_is_light():
    code = (
        "import sys, mmd_equality; heavy = {'torch','transformers','matplotlib','openai','aiohttp','numba','typer','scipy.stats',"
        "'pandas','sqlite3'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_cannot_work_is_said_before_any_work(files, tmp_path):
    pair = ("test", files["ref"], files["same"])
    for options, message in (
        (("--json", tmp_path), "cannot write"),
        (("--json", tmp_path / "no" / "out.json"), "cannot write"),
        (("--audit-id", "a"), "--audit-id needs a file"),
        (("--max-length", "0"), "max_length must be >= 1"),
        (("--max-length", "9999999999"), "pass a smaller max_length"),
        (("--min-effect", "nan"), "distortion must be an MMD"),
    ):
        result = run(*pair, *options)
        assert result.exit_code == 2, options
        assert message in result.output
        assert result.output.count("\n") == 1
    assert run("plan", files["ref"], files["ref"]).exit_code == 2
    assert run("plan", files["ref"], files["same"], "--price-in", "-1").exit_code == 2
    assert run("sample", "--prompts", "questions", "--out", "x", "--gguf", "x", "--n", "0", "--dry-run").exit_code == 2


def test_a_half_result_and_a_config_without_files_are_refused(tmp_path):
    for text in ('{"kind": "test"}', '{"kind": "audit", "rows": [1]}', '{"kind": "plan", "rows": null}'):
        (tmp_path / "r.json").write_text(text, encoding="utf-8")
        result = run("report", tmp_path / "r.json")
        assert result.exit_code == 2
        assert "not a whole result" in result.output
    (tmp_path / "a.toml").write_text('[references]\na = 3\n[endpoints]\nb = "y.jsonl"\n', encoding="utf-8")
    assert "[references] must name files" in run("audit", tmp_path / "a.toml").output


def test_the_help_of_audit_names_its_tables():
    assert "references and endpoints" in " ".join(run("audit", "--help").output.replace("\u2502", " ").split())


def test_a_page_of_an_audit_begins_with_the_answer_and_keeps_its_figures_apart(source, tmp_path):
    from mmd_equality import audit

    bags = {"a/b": source(10, m=2, seed=2), "a b": source(10, m=2, seed=3), "x" * 300: source(10, m=2, seed=4)}
    document = json.loads(audit({"r": source(10, m=2, seed=1)}, bags, n_permutations=999, alpha=0.05).to_json())
    page = render_html(document)
    assert page.index("<h2>Verdicts") < page.index("<img")
    markdown = render_markdown(document, figures=tmp_path / "figures")
    assert markdown.index("## Verdicts") < markdown.index("![")
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 9
