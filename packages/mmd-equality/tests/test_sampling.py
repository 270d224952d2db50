"""Collecting samples: against a real HTTP server on loopback, through kill -9, and with everything that servers get wrong."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import count

import pytest

from chapbook_shared.jobs import SettingsMismatchError
from chapbook_shared.lm import Capabilities, Completion, Faults, RequestFailed, Sampling, ScriptedModel, Server, Usage
from mmd_equality import Samples, two_sample_test
from mmd_equality.sampling import (
    VLLM,
    LlamaCpp,
    OpenAICompatible,
    Prompt,
    Transformers,
    load_prompts,
    prompt_sets,
    sample,
    template_tokens,
)

PROMPTS = [Prompt("a", "Say something."), Prompt("b", "Say something else.")]


def numbered(**fields):
    """A model whose every answer is another one."""
    numbers = count()

    def make():
        return Completion(f"answer {next(numbers)}", "stop", fields.get("model", "scripted"), usage=fields.get("usage"))

    return ScriptedModel(
        chat=lambda messages, sampling: make(), complete=lambda prompt, sampling: make(), name="scripted"
    )


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_exactly_n_of_each_prompt_with_all_that_identifies_them(tmp_path):
    report = sample(
        numbered(usage=Usage(7, 2)), PROMPTS, n=5, out=tmp_path / "s.jsonl", sampling=Sampling(max_tokens=9)
    )
    assert report.samples.counts == {"a": 5, "b": 5}
    assert len(set(report.samples.completions)) == 10
    for row in rows(tmp_path / "s.jsonl"):
        assert row["settings_hash"] == report.settings_hash
        assert row["usage"] == {"prompt_tokens": 7, "completion_tokens": 2}
        assert {"sample", "finish_reason", "served_model", "time", "max_tokens"} <= set(row)
    assert report.samples.meta["usage"]["rows"] == 10


def test_a_second_run_asks_only_for_what_is_missing(tmp_path):
    out = tmp_path / "s.jsonl"
    model = numbered()
    sample(model, PROMPTS, n=3, out=out)
    before = rows(out)
    assert sample(model, PROMPTS, n=3, out=out).requested == 0
    more = sample(model, PROMPTS, n=5, out=out)
    assert more.requested == 4
    assert [r for r in rows(out) if r["sample"] < 3] == before
    assert more.samples.counts == {"a": 5, "b": 5}


def test_fewer_than_before_exports_the_first_n(tmp_path):
    sample(numbered(), PROMPTS, n=5, out=tmp_path / "s.jsonl")
    assert sample(numbered(), PROMPTS, n=2, out=tmp_path / "s.jsonl").samples.counts == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    "change", [{"sampling": Sampling(temperature=0.5)}, {"verb": "complete"}, {"extra": {"build": 2}}]
)
def test_other_settings_refuse_to_append(tmp_path, change):
    sample(numbered(), PROMPTS, n=2, out=tmp_path / "s.jsonl")
    with pytest.raises(SettingsMismatchError):
        sample(numbered(), PROMPTS, n=3, out=tmp_path / "s.jsonl", **change)


def test_every_request_has_its_own_seed_and_full_distribution_settings(tmp_path):
    model = numbered()
    sample(model, PROMPTS, n=10, out=tmp_path / "s.jsonl", sampling=Sampling(max_tokens=5))
    asked = [call.sampling for call in model.calls]
    assert len({s.seed for s in asked}) == 20
    assert {(s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) for s in asked} == {
        (1.0, 1.0, 0, 0.0, 1.0)
    }


def test_a_failed_request_is_recorded_and_counts(tmp_path):
    order = {}

    def sometimes(messages, sampling):
        if order.setdefault(sampling.seed, len(order)) % 4 == 3:
            raise RequestFailed("503 after 6 tries")
        return Completion(f"x{sampling.seed}", "stop", "m")

    model = ScriptedModel(chat=sometimes, name="flaky")
    report = sample(model, PROMPTS, n=8, out=tmp_path / "s.jsonl", concurrency=1)
    assert report.failed == 4
    assert sum(report.samples.counts.values()) + report.failed == 16
    assert report.samples.failure_rate == 0.25
    assert any("failed-requests" in w for w in report.warnings)
    again = sample(ScriptedModel(chat="fine", name="flaky"), PROMPTS, n=8, out=tmp_path / "s.jsonl", retry_failed=True)
    assert again.requested == 4
    assert again.failed == 0
    assert again.samples.counts == {"a": 8, "b": 8}


def test_filtered_answers_are_asked_again_and_then_recorded_as_failed(tmp_path):
    filtered = lambda text: Completion(text, "content_filter", "m")  # noqa: E731
    good = Completion("ok", "stop", "m")
    model = ScriptedModel(chat=[good, filtered("half"), filtered("half"), good, *[filtered("half")] * 3], name="m")
    report = sample(model, [Prompt("a", "hi")], n=3, out=tmp_path / "s.jsonl", concurrency=1)
    assert report.samples.counts == {"a": 2}
    assert report.samples.failures == {"a": 1}
    assert rows(tmp_path / "s.jsonl")[-1]["error"] == "content_filter"


def test_an_empty_answer_is_an_answer(tmp_path):
    report = sample(ScriptedModel(chat="", name="m"), PROMPTS, n=2, out=tmp_path / "s.jsonl")
    assert report.samples.completions == ("",) * 4


def test_if_the_first_request_fails_nothing_is_recorded(tmp_path):
    def broken(messages, sampling):
        raise RequestFailed("401")

    with pytest.raises(RuntimeError, match="first request failed, so nothing was recorded: RequestFailed: 401"):
        sample(ScriptedModel(chat=broken, name="m"), PROMPTS, n=2, out=tmp_path / "s.jsonl")
    assert sample(ScriptedModel(chat="fine", name="m"), PROMPTS, n=2, out=tmp_path / "s.jsonl").failed == 0


def test_ignored_settings_are_noticed(tmp_path):
    report = sample(
        numbered(usage=Usage(5, 500)), PROMPTS, n=2, out=tmp_path / "a.jsonl", sampling=Sampling(max_tokens=50)
    )
    assert any("settings-not-honoured" in w for w in report.warnings)
    copies = sample(ScriptedModel(chat="the same", name="m"), PROMPTS, n=10, out=tmp_path / "b.jsonl")
    assert any("copies of one another" in w for w in copies.warnings)


def test_a_template_mismatch_shows_both_numbers(tmp_path):
    report = sample(
        numbered(usage=Usage(31, 2)), PROMPTS, n=2, out=tmp_path / "s.jsonl", expected_prompt_tokens=lambda p: 30
    )
    assert any("template-mismatch: 31 prompt tokens reported, 30 here" in w for w in report.warnings)


def test_the_local_template_counts_what_is_sent(tmp_path):
    class Tokenizer:
        def apply_chat_template(self, turns, **options):
            return {"input_ids": [0] * (4 + sum(len(turn["content"].split()) for turn in turns))}

    report = sample(
        numbered(usage=Usage(6, 1)),
        PROMPTS,
        n=1,
        out=tmp_path / "s.jsonl",
        expected_prompt_tokens=template_tokens(Tokenizer()),
    )
    assert report.warnings == ("template-mismatch: 6 prompt tokens reported, 7 here (1 completions)",)


def test_sampling_inside_a_running_loop(tmp_path):
    import asyncio

    async def notebook():
        return sample(numbered(), PROMPTS, n=2, out=tmp_path / "s.jsonl")

    assert asyncio.run(notebook()).samples.counts == {"a": 2, "b": 2}


def test_what_was_finished_before_an_interruption_can_be_read(tmp_path):
    class Interrupted:
        name, capabilities, asked = "m", Capabilities(chat=True), 0

        async def achat(self, messages, sampling):
            self.asked += 1
            if self.asked == 4:
                raise KeyboardInterrupt
            return Completion(f"answer {self.asked}", "stop", "m")

    with pytest.raises(KeyboardInterrupt):
        sample(Interrupted(), PROMPTS, n=4, out=tmp_path / "s.jsonl", concurrency=1)
    assert len(Samples.from_jsonl(tmp_path / "s.jsonl")) == 3


def test_a_change_of_the_served_model_warns_or_stops(tmp_path):
    answers = lambda: [Completion(f"t{i}", "stop", "old" if i < 2 else "new") for i in range(4)]  # noqa: E731
    report = sample(ScriptedModel(chat=answers(), name="m"), PROMPTS, n=2, out=tmp_path / "a.jsonl", concurrency=1)
    assert any("served-model-changed: answered by new, old" in w for w in report.warnings)
    with pytest.raises(RuntimeError, match="changed from 'old' to 'new'"):
        sample(
            ScriptedModel(chat=answers(), name="m"), PROMPTS, n=2, out=tmp_path / "b.jsonl", concurrency=1, strict=True
        )


def test_a_bad_call_is_refused_before_anything_is_asked(tmp_path):
    model = numbered()
    with pytest.raises(ValueError, match="n must be"):
        sample(model, PROMPTS, n=0, out=tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="needs verb='complete'"):
        sample(model, PROMPTS, n=2, out=tmp_path / "s.jsonl", per_request=2)
    with pytest.raises(ValueError, match="prompts is empty"):
        sample(model, [], n=2, out=tmp_path / "s.jsonl")
    assert not model.calls


def test_two_servers_over_http_are_told_apart_and_one_is_not_told_from_itself(tmp_path):
    def speaker(words):
        return ScriptedModel(
            chat=lambda messages, sampling: " ".join(words[(sampling.seed >> k) % len(words)] for k in range(6)),
            name="m",
        )

    drawn = {}
    for name, words, seed in (
        ("ref", "red green blue", 1),
        ("same", "red green blue", 2),
        ("other", "red red red green", 3),
    ):
        with Server(speaker(words.split())) as server:
            model = OpenAICompatible(server.base_url, "m", concurrency=8)
            drawn[name] = sample(model, PROMPTS, n=25, out=tmp_path / f"{name}.jsonl", seed=seed).samples
            model.close()
    assert two_sample_test(drawn["ref"], drawn["same"], random_state=0).pvalue > 0.01
    assert two_sample_test(drawn["ref"], drawn["other"], random_state=0).pvalue <= 0.01


def test_a_misbehaving_server_loses_nothing(tmp_path):
    faults = Faults("ok,429:0,503,drop,malformed,empty,cut,lose")
    with Server(numbered(), faults=faults) as server:
        model = OpenAICompatible(server.base_url, "scripted", concurrency=4)
        report = sample(model, PROMPTS, n=6, out=tmp_path / "s.jsonl")
        model.close()
    assert report.failed == 0
    assert report.samples.counts == {"a": 6, "b": 6}


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="MMD_TEST_KEY is not set"):
        OpenAICompatible("http://127.0.0.1:9/v1", "m", api_key_env="MMD_TEST_KEY")
    monkeypatch.setenv("MMD_TEST_KEY", "sk-very-secret")
    with Server(numbered(), api_key="sk-very-secret") as server:
        model = OpenAICompatible(server.base_url, "scripted", api_key_env="MMD_TEST_KEY")
        sample(model, PROMPTS, n=2, out=tmp_path / "s.jsonl")
        model.close()
    for file in tmp_path.iterdir():
        assert b"sk-very-secret" not in file.read_bytes()


def test_killed_again_and_again_it_ends_with_exactly_n(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from chapbook_shared.lm import Capabilities, Completion, ScriptedModel
            from mmd_equality.sampling import Prompt, sample
            def slow(messages, sampling):
                time.sleep(0.005)
                return Completion(f"{sampling.seed}", "stop", "m")
            prompts = [Prompt(i, f"prompt {i}") for i in range(4)]
            print("go", flush=True)
            sample(ScriptedModel(chat=slow, name="m"), prompts, n=25, out=sys.argv[1], concurrency=3)
            """
        ),
        encoding="utf-8",
    )
    out = tmp_path / "s.jsonl"
    kills = 0
    for attempt in range(12):
        process = subprocess.Popen(
            [sys.executable, str(script), str(out)], stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout.readline() == b"go\n"
        try:
            process.wait(timeout=0.15 + 0.02 * attempt if kills < 4 else 60)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.stdout.close()
        if process.wait() == 0:
            break
    done = rows(out)
    assert kills >= 1
    assert Counter(row["prompt_id"] for row in done) == dict.fromkeys(range(4), 25)
    assert sorted((r["prompt_id"], r["sample"]) for r in done) == [(i, k) for i in range(4) for k in range(25)]
    assert len({row["completion"] for row in done}) == 100


def test_the_prompt_sets_that_come_with_the_package():
    sets = prompt_sets()
    assert {name: len(prompts) for name, prompts in sets.items()} == {"continuations": 25, "code": 20, "questions": 20}
    assert len({p.text for prompts in sets.values() for p in prompts}) == 65


def test_prompt_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"just text"\n{"id": "m", "messages": [{"role": "user", "content": "hi"}]}\n', encoding="utf-8")
    first, second = load_prompts(path)
    assert (first.id, first.text) == (0, "just text")
    assert second.messages == ({"role": "user", "content": "hi"},)
    for text, message in (("{", "line 1: not JSON"), ("[1]", "JSON object or string"), ('{"id": 1}', "no 'prompt'"), ("", "no prompts"),
                          ('{"id":1,"prompt":"a"}\n{"id":1,"prompt":"b"}', "unique")):  # fmt: skip
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_prompts(path)
    with pytest.raises(FileNotFoundError, match="the sets that come with"):
        load_prompts(tmp_path / "none.jsonl")


def test_thin_constructors_say_what_they_lack():
    with pytest.raises(ValueError, match="model must be the name"):
        VLLM()
    assert VLLM(model="m").name == "m"
    with pytest.raises(ValueError, match="needs its tokenizer"):
        Transformers(object())


# -- files


def test_files_round_trip_exactly(tmp_path):
    texts = [
        "plain",
        "",
        "two\nlines\r\n\u2028",
        "nul\0",
        "caf\u00e9",
        "cafe\u0301",
        "\U0001f468\u200d\U0001f469",
        "\ud83d\ude00",
        "\udc00 x",
    ]
    before = Samples(list(range(len(texts))), texts, failures={3: 2})
    before.to_jsonl(tmp_path / "s.jsonl")
    after = Samples.from_jsonl(tmp_path / "s.jsonl")
    assert after.completions == before.completions
    assert after.fingerprint() == before.fingerprint()
    assert after.failures == {3: 2}
    tokens = Samples(["p", "p"], [[1, 2], []])
    tokens.to_jsonl(tmp_path / "t.jsonl")
    assert Samples.from_jsonl(tmp_path / "t.jsonl").completions == ((1, 2), ())


def test_surrogates_emoji_and_marks_are_one_code_point_each():
    rows_ = Samples([0, 0], ["\ud83d\ude00", "e\u0301\0"]).encode()
    assert rows_.tolist() == [[0xD83D, 0xDE00, -1], [0x65, 0x301, 0]]
    assert Samples([0], ["\U0001f600"]).encode().tolist() == [[0x1F600]]


def test_a_torn_last_line_is_dropped_and_a_broken_one_elsewhere_is_an_error(tmp_path):
    path = tmp_path / "s.jsonl"
    good = '{"prompt_id": 0, "completion": "a"}\n'
    path.write_text(good + '{"prompt_id": 0, "compl', encoding="utf-8")
    torn = Samples.from_jsonl(path)
    assert len(torn) == 1
    assert torn.meta["torn_last_line"] == 2
    path.write_text('{"prompt_id": 0, "compl\n' + good, encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        Samples.from_jsonl(path)


def test_rows_without_a_prompt_or_a_completion_are_named(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"completion": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="row 1: no 'prompt_id'"):
        Samples.from_jsonl(path)
    path.write_text('{"prompt_id": 1, "completion": null}\n', encoding="utf-8")
    with pytest.raises(TypeError, match="completion is missing or None"):
        Samples.from_jsonl(path)


def test_everything_after_the_first_end_token_is_cut_also_when_it_comes_first():
    cut = Samples([0, 0, 0], [[5, 2, 7], [2, 9, 9], [5, 6]]).until(2)
    assert cut.completions == ((5, 2), (2,), (5, 6))
    assert cut.encode(3).tolist() == [[5, 2, -1], [2, -1, -1], [5, 6, -1]]


def test_splits_are_disjoint_and_whole(source):
    bag = source(10, m=2)
    first, rest = bag.split(4, random_state=0)
    assert first.counts == {0: 4, 1: 4}
    assert rest.counts == {0: 6, 1: 6}
    assert Counter([*first.completions, *rest.completions]) == Counter(bag.completions)
    assert [p.counts for p in bag.parts(3)] == [{0: 3, 1: 3}] * 3
    with pytest.raises(ValueError, match="fewer than n = 11"):
        bag.split(11)
    with pytest.raises(ValueError, match="too few for 11 parts"):
        bag.parts(11)


def test_from_a_dataset():
    rows_ = [{"q": "p", "text": "a"}, {"q": "p", "text": "b"}]
    assert Samples.from_dataset(rows_, prompt_column="q", completion_column="text").completions == ("a", "b")


def test_a_filtered_first_prompt_does_not_stop_the_rest(tmp_path):
    def chat(messages, sampling):
        filtered = messages[0].text == "Say something."
        return Completion("half", "content_filter" if filtered else "stop", "m")

    report = sample(ScriptedModel(chat=chat, name="m"), PROMPTS, n=2, out=tmp_path / "s.jsonl")
    assert report.samples.failures == {"a": 2}
    assert report.samples.counts == {"b": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": [1], "text": "x"}, "id must be a str or an int, got list"),
        ({"id": 1, "text": 5}, "text of prompt 1 must be a str, got int"),
        ({"id": 1, "messages": ("x",)}, "a turn of prompt 1 must be"),
        ({"id": 1, "messages": ({"role": "user"},)}, "a turn of prompt 1 must be"),
    ],
)
def test_bad_prompts_are_named(fields, message):
    with pytest.raises(TypeError, match=message):
        Prompt(**fields)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"id": 1, "prompt": "x"}\n')
    assert load_prompts(tmp_path / "p.jsonl")[0].id == 1
    (tmp_path / "s.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt_id": 1, "completion": "x"}\n')
    assert Samples.from_jsonl(tmp_path / "s.jsonl").completions == ("x",)
    (tmp_path / "p.jsonl").write_bytes('{"id": 1, "prompt": "\u00e9"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_prompts(tmp_path / "p.jsonl")


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no GGUF file"), LlamaCpp(tmp_path / "none.gguf"):
        pass
    with pytest.raises(FileNotFoundError, match="no model folder"):
        Transformers(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        sample(numbered(), PROMPTS, n=2, out=tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_id": [1]}, "row 1: prompt_id must be a str or an int"),
        ({"prompt_id": [1], "completion": None, "error": "x"}, "row 1: prompt_id must be a str or an int"),
        ({"max_tokens": "abc"}, "row 1: max_tokens must be a number"),
        ({"usage": {"prompt_tokens": -1}}, "row 1: prompt_tokens must be a number"),
        ({"codepoints": [-1]}, "row 1: codepoints must be"),
        ({"completion": 5}, "row 1: completion must be a text, got int"),
    ],
)
def test_a_bad_row_is_named(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Samples.from_rows([{"prompt_id": 0, "completion": "a", **fields}])


def test_token_ids_that_are_a_text_are_refused():
    with pytest.raises(TypeError, match="token_ids must be a list of integers"):
        Samples.from_rows([{"prompt_id": 0, "token_ids": "abc"}])
