"""Facts about the two steps, with scripted models: what is sent, what is kept, and what a row is made of."""

import math
import warnings
from collections import Counter

import pytest

from chapbook_shared.jobs import SettingsMismatchError, Store
from chapbook_shared.lm import Capabilities, Completion, OpenAIModel, RequestFailed, ScriptedModel, Server, Usage
from magpie_synth import (
    LANGUAGES,
    BackendError,
    InstructionSettings,
    Magpie,
    ResponseSettings,
    Run,
    SystemPromptError,
    derive_template,
)
from magpie_synth.settings import RowKey, SystemMix, check_schedule, row_keys

CAN = Capabilities(complete=True, token_prompts=True, token_ids=True, seed=True)


@pytest.fixture
def magpie(scripted, chatml):
    def make(question=None, answer=None, **options):
        model = scripted(question, answer)
        return Magpie(model, tokenizer=chatml, **options), model

    return make


def test_the_first_step_sends_the_pre_query_template_and_the_second_adds_the_question(magpie, chatml):
    made, model = magpie()
    rows = made.responses(made.instructions(2))
    prompts = [chatml.decode(list(call.request)) for call in model.calls]
    assert prompts[:2] == ["<|im_start|>user\n"] * 2
    assert prompts[2] == f"<|im_start|>user\n{rows[0].instruction}<|im_end|>\n<|im_start|>assistant\n"
    assert model.calls[0].sampling.temperature == 1.0
    assert model.calls[2].sampling.temperature == 0.0  # the paper's responses are greedy


def test_every_row_has_a_seed_of_its_own_whatever_else_is_drawn(magpie):
    few, many = (magpie()[0].instructions(n) for n in (3, 9))
    assert [record["instruction"] for record in few] == [record["instruction"] for record in many][:3]
    assert len({record["instruction"] for record in many}) == 9
    assert magpie(seed=1)[0].instructions(3)[0]["instruction"] != few[0]["instruction"]


def test_a_schedule_draws_each_cell_with_its_own_temperature(magpie):
    made, model = magpie()
    records = made.instructions(schedule=[(1.0, 1.0, 3), (1.2, 0.995, 2)])
    assert Counter(
        (r["cell"], r["gen_input_configs"]["temperature"], r["gen_input_configs"]["top_p"]) for r in records
    ) == {
        (0, 1.0, 1.0): 3,
        (1, 1.2, 0.995): 2,
    }
    assert Counter(call.sampling.temperature for call in model.calls) == {1.0: 3, 1.2: 2}


def test_ids_sort_by_index_so_that_added_rows_come_last():
    short = [key.id for key in row_keys(5, [(1.0, 1.0, 2), (1.2, 1.0, 2)])]
    long = [key.id for key in row_keys(5, [(1.0, 1.0, 3), (1.2, 1.0, 4)])]
    assert long[: len(short)] == short == sorted(short)
    assert long == sorted(long)
    assert [RowKey.parse(id).id for id in long] == long


def test_a_row_says_how_it_was_made(magpie):
    made, _ = magpie(revision="abc")
    (row,) = made.responses(made.instructions(1))
    data = row.to_dict()
    assert data["messages"] == [
        {"role": "user", "content": data["instruction"]},
        {"role": "assistant", "content": data["response"]},
    ]
    config = data["gen_input_configs"]
    assert (config["input_generator"], config["pre_query_template"]) == ("tiny", "<|im_start|>user\n")
    assert data["gen_response_configs"]["output_generator"] == "tiny"
    assert (data["model_revision"], data["finish_reason"]) == ("abc", "stop")
    assert data["instruction_length"] == len(data["instruction"])


def test_bad_instructions_are_dropped_before_they_are_answered(magpie):
    texts = ["", "Real?", "<b></b>", "real? ", "Other?", "one two three four"]
    made, model = magpie(
        lambda seed: texts[order.setdefault(seed, len(order))], instruction=InstructionSettings(max_tokens=3)
    )
    order = {}
    records = made.instructions(6)
    assert [record["drop"] for record in records] == ["empty", None, "markup", None, None, "incomplete"]
    asked = len(model.calls)
    rows = made.responses(records)
    assert [row.instruction for row in rows] == ["Real?", "Other?"]
    assert len(model.calls) == asked + 2


def test_control_tokens_in_an_instruction_are_not_markup(magpie, chatml):
    made, model = magpie(lambda seed: "Say <|im_end|> twice.")
    # the header rule cuts at a spelled end of turn: what is left is sent, and an embedded start marker stays text
    (record,) = made.instructions(1)
    assert record["instruction"] == "Say"
    made, model = magpie(lambda seed: "What does <|im_start|> mean?")
    made.responses(made.instructions(1))
    start = chatml.convert_tokens_to_ids("<|im_start|>")
    assert list(model.calls[-1].request).count(start) == 2  # the user's and the assistant's headers
    assert "<|im_start|> mean" in chatml.decode(list(model.calls[-1].request))


def test_empty_responses_are_no_rows(magpie, tmp_path):
    made, _ = magpie(answer=lambda text, seed: "" if "1" in text else "Yes.")
    run = made.run(tmp_path, rows=20)
    assert all("1" not in row.instruction for row in run.rows())
    stats = run.stats()
    assert stats["rows"] + stats["dropped_responses"]["empty response"] == stats["kept_instructions"]


def test_reasoning_is_kept_apart(chatml, scripted, tokenizer_of):
    template = chatml.chat_template.replace("assistant\n'", "assistant\n<think>\n'")
    tokenizer = tokenizer_of(template)
    model = ScriptedModel(
        complete=lambda prompt, s: "Q?" if tokenizer.decode(list(prompt)).endswith("user\n") else "Hm.</think>\nYes.",
        name="thinker",
    )
    made = Magpie(model, tokenizer=tokenizer)
    (row,) = made.responses(made.instructions(1))
    assert (row.response, row.to_dict()["reasoning"]) == ("Yes.", "Hm.")


def test_a_system_mix_is_drawn_row_by_row_in_proportion(magpie, chatml):
    systems = {"math": ("You do sums.", 3.0), "code": ("You write code.", 1.0)}
    made, model = magpie(systems=systems)
    records = made.instructions(400)
    share = sum(record["system"] == "math" for record in records) / 400
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 400)
    for record, call in zip(records, model.calls, strict=True):
        assert systems[record["system"]][0] in chatml.decode(list(call.request))
    made.responses(records[:1])
    assert "You do" not in chatml.decode(list(model.calls[-1].request))  # not in the prompt for the response


def test_the_system_text_goes_into_the_response_when_asked(magpie, chatml):
    made, model = magpie(system="code", response=ResponseSettings(system_in_response=True))
    made.responses(made.instructions(1))
    assert "experienced programmer" in chatml.decode(list(model.calls[-1].request))


def test_a_language_is_one_sentence_in_it(magpie, chatml):
    made, model = magpie(language="de")
    made.instructions(1)
    assert LANGUAGES["de"] in chatml.decode(list(model.calls[0].request))
    with pytest.raises(ValueError, match="language must be one of"):
        magpie(language="tlh")
    with pytest.raises(ValueError, match="give one of system, systems and language"):
        magpie(language="de", system="math")


def test_later_turns_are_asked_with_the_conversation_before_them(magpie, chatml, tmp_path):
    made, model = magpie()
    run = made.run(tmp_path, rows=3, turns=3)
    for row in run.rows():
        assert row.turns == 3
        data = row.to_dict()
        assert [m["role"] for m in data["messages"]] == ["user", "assistant"] * 3
        assert data["messages"][2]["content"] == data["instruction_2"]
    prompts = [chatml.decode(list(call.request)) for call in model.calls]
    follow_ups = [p for p in prompts if p.endswith("<|im_start|>user\n") and p.count("user\n") > 1]
    assert len(follow_ups) == 6
    assert all("several rounds" in p and p.startswith("<|im_start|>system") for p in follow_ups)
    assert not any("several rounds" in p for p in prompts if p.endswith("assistant\n"))
    in_memory = made.extend(made.responses(made.instructions(3)), 3)
    assert [row.conversation() for row in in_memory] == [row.conversation() for row in run.rows()]


def test_more_rows_responses_and_turns_may_be_asked_for_later(magpie, tmp_path):
    made, model = magpie()
    first = made.run(tmp_path / "a", rows=4, responses=2)
    assert len(first.rows()) == 2
    done = len(model.calls)
    again = made.run(tmp_path / "a", rows=4, responses=2)
    assert len(model.calls) == done  # nothing is done twice
    more = made.run(tmp_path / "a", rows=6, turns=2)
    whole = magpie()[0].run(tmp_path / "b", rows=6, turns=2)
    strip = lambda run: [{k: v for k, v in row.items() if k != "created"} for row in run]  # noqa: E731
    assert strip(more) == strip(whole)
    assert len(again.rows()) == 6  # a run is a view of its folder


def test_another_configuration_is_refused_with_what_differs(magpie, tmp_path):
    magpie()[0].run(tmp_path, rows=2)
    other = magpie(seed=9, instruction=InstructionSettings(max_tokens=7))[0]
    with pytest.raises(SettingsMismatchError) as caught:
        other.run(tmp_path, rows=2)
    assert set(caught.value.differing) == {"seed", "instruction"}
    run = other.run(tmp_path, rows=2, force_new=True)
    assert run.settings["seed"] == 9
    assert Run(tmp_path).rows()[0].id.startswith("9-")
    with Store(tmp_path / "run-1.sqlite", read_only=True) as old:
        assert old.settings["seed"] == 0


def test_a_chat_model_is_refused_with_the_reason(chatml):
    with pytest.raises(BackendError, match=r"chats but does not complete.*so the model answers instead of asking"):
        Magpie(ScriptedModel("hi", name="chatty"), tokenizer=chatml)


def test_an_endpoint_without_completions_is_told_from_one_that_fails(chatml):
    class Gone(ScriptedModel):
        def complete_each(self, requests):
            next(iter(requests))
            raise RequestFailed("HTTP 404: no such path", status=404)
            yield

    with pytest.raises(BackendError, match="has no completions endpoint"):
        Magpie(Gone(complete=lambda p, s: "x"), tokenizer=chatml).instructions(1)


def test_a_tokenizer_is_needed_for_a_server():
    with pytest.raises(ValueError, match="tokenizer is needed for m"):
        Magpie(ScriptedModel(complete=lambda p, s: "x", name="m"))


@pytest.mark.parametrize("question", [lambda seed: "", lambda seed: "The same."])
def test_a_model_that_was_not_aligned_is_noticed_in_a_pilot(magpie, tmp_path, question):
    made, _ = magpie(question)
    with pytest.warns(
        UserWarning, match="of the first 32 instructions of tiny are empty, cut at the limit or duplicates"
    ):
        made.run(tmp_path / "a", rows=40)
    with pytest.raises(BackendError, match="is this an aligned model"):
        made.run(tmp_path / "b", rows=40, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        magpie()[0].run(tmp_path / "c", rows=40)


class Failing(ScriptedModel):
    """Runs out of memory on more than three rows, and has NaN logits on one prompt."""

    def __init__(self, script, *, bad=None):
        super().__init__(complete=script, name="tiny")
        self.bad, self.sizes = bad, []

    def _complete_batch(self, requests):
        self.sizes.append(len(requests))
        if self.bad is None and len(requests) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        if self.bad is not None and any(self.bad == sampling.seed for _, sampling in requests):
            raise FloatingPointError("the model's logits are NaN")
        return super()._complete_batch(requests)


def test_a_batch_that_does_not_fit_is_halved_until_it_does(chatml, scripted):
    script = scripted()._complete_script
    model = Failing(script)
    with pytest.warns(UserWarning, match="16 rows are tried again in halves"):
        records = Magpie(model, tokenizer=chatml).instructions(16)
    whole = Magpie(ScriptedModel(complete=script, name="tiny"), tokenizer=chatml).instructions(16)
    assert [r["instruction"] for r in records] == [r["instruction"] for r in whole]
    assert model.sizes == [16, 8, 4, 2, 2, 4, 2, 2, 8, 4, 2, 2, 4, 2, 2]


def test_a_row_that_fails_alone_is_named_and_the_others_are_kept(chatml, scripted, tmp_path):
    script = scripted()._complete_script
    records = Magpie(ScriptedModel(complete=script, name="tiny"), tokenizer=chatml).instructions(8)
    model = Failing(script, bad=records[5]["gen_input_configs"]["seed"])
    made = Magpie(model, tokenizer=chatml)
    with (
        pytest.warns(UserWarning, match="halves"),
        pytest.raises(BackendError, match=f"failed at row {records[5]['id']}: .*NaN"),
    ):
        made.run(tmp_path, rows=8)
    assert [r["id"] for r in Run(tmp_path).instructions()] == [r["id"] for r in records[:5]]
    model.bad = -1
    assert len(made.run(tmp_path, rows=8).instructions()) == 8


def test_other_errors_are_not_swallowed(chatml):
    def broken(prompt, sampling):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Magpie(ScriptedModel(complete=broken), tokenizer=chatml).instructions(2)


def test_preferences_are_the_first_best_against_the_first_worst(magpie):
    made, _ = magpie(answer=lambda text, seed: f"answer {(seed or 0) % 7}")
    rows = made.responses(made.instructions(6))
    pairs = made.preferences(rows, k=5, scorer=lambda chats: [float(chat[-1]["content"][-1]) for chat in chats])
    assert pairs
    for made_pair in pairs:
        chosen, rejected = made_pair["chosen"][0]["content"], made_pair["rejected"][0]["content"]
        assert float(chosen[-1]) == made_pair["score_chosen"] > made_pair["score_rejected"] == float(rejected[-1])
        assert made_pair["prompt"][0]["role"] == "user"


def test_preferences_in_a_store_go_on_and_are_scored_with_any_scorer(magpie, tmp_path):
    made, model = magpie(answer=lambda text, seed: f"answer {(seed or 0) % 7}")
    made.run(tmp_path, rows=4)
    run = made.run_preferences(tmp_path, k=3)
    done = len(model.calls)
    made.run_preferences(tmp_path, k=3)
    assert len(model.calls) == done
    with pytest.raises(SettingsMismatchError, match="temperature"):
        made.run_preferences(tmp_path, k=3, temperature=0.5)
    scorer = lambda chats: [float(chat[-1]["content"][-1]) for chat in chats]  # noqa: E731
    in_memory = made.preferences(run.rows(), k=3, scorer=scorer)
    stored = run.preferences(scorer, test_share=0.5)
    assert [{k: v for k, v in row.items() if k != "split"} for row in stored] == in_memory
    assert {row["split"] for row in run.preferences(scorer)} == {"train"}
    assert all(model_call.sampling.temperature == 0.8 for model_call in model.calls[done - 3 : done])


def test_an_endpoint_that_takes_text_alone_gets_the_prompt_without_bos(tokenizer_of):
    template = (
        "{{bos_token}}"
        "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    expected = derive_template(tokenizer)
    can = Capabilities(complete=True, seed=True)
    prompts = []

    def say(prompt, sampling):
        prompts.append(prompt)
        return Completion("Ask <|im_start|>?", "stop", "m", usage=Usage(len(expected.prompt_ids) + extra, 1))

    extra = 0
    made = Magpie(ScriptedModel(complete=say, name="m", capabilities=can), tokenizer=tokenizer)
    records = made.instructions(1)
    assert prompts == [expected.pre_query]  # this tokenizer puts no BOS before a text, so the template's stays
    answers = dict(made._responses((r["id"], r) for r in records))
    assert [a["drop"] for a in answers.values()] == ["control tokens"]
    extra = 1
    with pytest.raises(BackendError, match=r"read \d+ tokens where the template has \d+"):
        Magpie(ScriptedModel(complete=say, name="m", capabilities=can), tokenizer=tokenizer).instructions(1)


def test_a_server_that_stumbles_loses_no_row(chatml, scripted, tmp_path):
    with (
        Server(scripted(), faults="ok,429:0,500,ok,cut,malformed,drop,ok,503") as server,
        OpenAIModel("tiny", base_url=server.base_url, dialect="vllm", backoff=(0.01, 0.02), concurrency=4) as model,
    ):
        run = Magpie(model, tokenizer=chatml).run(tmp_path, rows=12)
    assert len(run.rows()) == 12
    local = Magpie(scripted(), tokenizer=chatml)
    assert [row.instruction for row in run.rows()] == [record["instruction"] for record in local.instructions(12)]


def test_a_refused_request_stops_the_run_with_the_servers_words(chatml, scripted, tmp_path):
    with (
        Server(scripted(), faults="ok,ok,400") as server,
        OpenAIModel("tiny", base_url=server.base_url, dialect="vllm", concurrency=1) as model,
    ):
        made = Magpie(model, tokenizer=chatml)
        with pytest.raises(RequestFailed, match="fault 400 on order"):
            made.run(tmp_path, rows=5)
        assert len(Run(tmp_path).instructions()) == 2  # nothing empty was saved
        assert len(made.run(tmp_path, rows=5).rows()) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: check_schedule([]), "schedule must hold at least one"),
        (lambda: check_schedule([(1.0, 1.0)]), r"must hold \(temperature, top_p, rows\)"),
        (lambda: check_schedule([(1.0, 0.0, 5)]), "top_p must be in"),
        (lambda: check_schedule([(1.0, 1.0, 0)]), "rows must be >= 1"),
        (lambda: SystemMix({}), "systems must name at least one"),
        (lambda: SystemMix({"a": ("x", 0.0)}), r"the weight of systems\['a'\] must be positive"),
        (lambda: InstructionSettings(max_tokens=0), "max_tokens must be >= 1"),
        (lambda: InstructionSettings(first_token_temperature=0), "first_token_temperature must be positive"),
        (lambda: ResponseSettings(top_p=2), "top_p must be in"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rows_or_a_schedule(magpie):
    made, _ = magpie()
    with pytest.raises(ValueError, match="give rows, or a schedule"):
        made.instructions()
    with pytest.raises(ValueError, match="rows is 3, but the schedule has 2"):
        made.instructions(3, schedule=[(1.0, 1.0, 2)])


def test_a_system_text_that_the_template_refuses(scripted, tokenizer_of):
    template = "{% for m in messages %}{% if m['role']=='system' %}{{raise_exception('no')}}{% endif %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
    tokenizer = tokenizer_of(template)
    with pytest.raises(SystemPromptError, match="rejects"):
        Magpie(scripted(), tokenizer=tokenizer, system="math")
    made = Magpie(scripted(), tokenizer=tokenizer, system="math", system_fallback="prepend")
    rows = made.responses(made.instructions(1))
    assert rows[0].to_dict()["gen_input_configs"]["system_prepended"] is True
    with pytest.warns(UserWarning, match="takes no system text: turn 2 is asked for without one"):
        assert made.extend(rows, 2)[0].turns == 2


def test_there_is_no_run_where_none_was_begun(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run at"):
        Run(tmp_path)


def test_another_model_may_answer_under_its_own_template(scripted, chatml, tokenizer_of):
    other = tokenizer_of(chatml.chat_template.replace("<|im_end|>", "<|eot|>"), special=("<|im_start|>", "<|eot|>"))
    prompts = []

    def say(prompt, sampling):
        prompts.append((other.decode(list(prompt)), sampling))
        return "Yes."

    answerer = ScriptedModel(complete=say, name="answerer")
    made = Magpie(scripted(), tokenizer=chatml, responder=answerer, responder_tokenizer=other)
    (row,) = made.responses(made.instructions(1))
    (prompt, sampling) = prompts[0]
    assert prompt == f"<|im_start|>user\n{row.instruction}<|eot|>\n<|im_start|>assistant\n"
    assert other.convert_tokens_to_ids("<|eot|>") in sampling.stop_token_ids
    data = row.to_dict()
    assert data["gen_response_configs"]["output_generator"] == "answerer"
    assert data["gen_input_configs"]["input_generator"] == "tiny"
