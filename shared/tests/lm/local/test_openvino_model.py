import shutil
import subprocess
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chapbook_shared.lm import CapabilityError, LanguageModel, LanguageModelError, LocalModel, OpenVINOModel, Sampling
from chapbook_shared.lm import openvino_model as module
from chapbook_shared.lm._base import sample_seed

GREEDY = Sampling(temperature=0, max_tokens=12, seed=0)


class _WithCache(torch.nn.Module):
    """One layer's keys and values as plain arguments and results, which the converter can then turn into state."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, keys: Any, values: Any
    ) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        cache.layers[0].lazy_initialization(keys, values)
        cache.layers[0].keys, cache.layers[0].values = keys, values
        past, new = keys.shape[2], input_ids.shape[1]
        causal = torch.arange(past + new)[None] <= torch.arange(new)[:, None] + past
        mask = causal[None, None] & (attention_mask[:, None, None, :] > 0)
        output = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, cache=cache, use_cache=True
        )
        return output.logits, cache.layers[0].keys, cache.layers[0].values


@pytest.fixture(scope="session")
def tiny_folder(tiny_vocabulary: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model in OpenVINO's format, made here: the real exporter takes a minute and an environment of its own."""
    import openvino as ov
    import openvino.opset13 as ops
    import openvino_tokenizers
    from openvino.passes import MakeStateful, Manager

    folder = tmp_path_factory.mktemp("openvino") / "tiny"
    heads, size = 2, 16
    past = torch.zeros(1, heads, 2, size)
    tokens = torch.tensor([[2, 3, 4]])
    example = (tokens, torch.ones(1, 5, dtype=torch.long), tokens, past, past)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer and the deprecation of tracing
        model = ov.convert_model(_WithCache(tiny_vocabulary.model), example_input=example)
    inputs = ["input_ids", "attention_mask", "position_ids", "past.key", "past.value"]
    outputs = ["logits", "present.key", "present.value"]
    for port, name in zip([*model.inputs, *model.outputs], [*inputs, *outputs], strict=True):
        port.get_tensor().set_names({name})
    model.reshape({name: [-1, heads, -1, size] if "past" in name else [-1, -1] for name in inputs})
    beams = ops.parameter([-1], np.int32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([beams])
    for name in ("past.key", "past.value"):
        port = model.input(name)
        users = port.get_target_inputs()
        chosen = ops.gather(port, beams.output(0), ops.constant(np.int64(0)))
        for user in users:
            user.replace_source_output(chosen.output(0))
    manager = Manager()
    manager.register_pass(MakeStateful({"past.key": "present.key", "past.value": "present.value"}))
    manager.run_passes(model)
    shape = ops.shape_of(model.input("input_ids"), output_type="i64")
    batch = ops.gather(shape, ops.constant([0]), ops.constant(0))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":  # state begins empty, for as many rows as there are
            empty = ops.concat([batch, ops.constant(np.array([heads, 0, size], dtype=np.int64))], 0)
            node.set_arguments([ops.broadcast(ops.constant(0.0, dtype=np.float32), empty)])
    model.validate_nodes_and_infer_types()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    pair = openvino_tokenizers.convert_tokenizer(tiny_vocabulary.tokenizer, with_detokenizer=True)
    for part, name in zip(pair, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(part, folder / f"openvino_{name}.xml")
    tiny_vocabulary.tokenizer.save_pretrained(folder)
    tiny_vocabulary.model.config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Any) -> OpenVINOModel:
    return OpenVINOModel(tiny_folder, name="tiny", eos_token_ids=[])


def test_greedy_text_is_local_models(tiny, tiny_vocabulary):
    local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, name="tiny", eos_token_ids=[])
    prompts = [[3, 4 + i % 8, 2 + i % 10, 5] for i in range(50)]
    theirs, ours = tiny.complete_many(prompts, GREEDY), local.complete_many(prompts, GREEDY)
    assert [c[0].text for c in theirs] == [c[0].text for c in ours]
    assert [c[0].token_ids for c in theirs] == [c[0].token_ids for c in ours]
    assert isinstance(tiny, LanguageModel)


def test_samples_follow_the_full_softmax_under_every_setting_it_takes(tiny, tiny_vocabulary, reference, setting):
    sampling = Sampling(n=2_500, seed=2, max_tokens=2, **setting)
    if tiny.capabilities.unsupported & set(setting):
        with pytest.raises(
            CapabilityError, match=r"cannot sample with (frequency_penalty|presence_penalty|logit_bias)"
        ):
            tiny.complete(tiny_vocabulary.prompt, sampling)
        return
    drawn = [c.token_ids for c in tiny.complete(tiny_vocabulary.prompt, sampling)]
    assert reference.sequence_p_value(tiny_vocabulary.model, tiny_vocabulary.prompt, sampling, drawn) > 1e-3


@pytest.mark.parametrize("penalty", [0.5, 1.8, 6.0])
def test_greedy_with_a_repetition_penalty_is_greedy_on_penalised_logits(tiny, tiny_vocabulary, reference, penalty):
    sampling = Sampling(temperature=0, max_tokens=16, repetition_penalty=penalty)
    assert tiny.complete(tiny_vocabulary.prompt, sampling)[0].token_ids == reference.greedy(
        tiny_vocabulary.model, tiny_vocabulary.prompt, sampling
    )


class TestSeeds:
    def test_a_request_gives_the_same_sample_alone_and_among_others(self, tiny):
        settings = [Sampling(seed=i, max_tokens=8) for i in range(30)]
        together = tiny.complete_many(["w3 w4"] * 30, settings)
        assert together == [tiny.complete("w3 w4", s) for s in settings]
        assert len({c[0].token_ids for c in together}) > 15

    def test_the_samples_of_one_request_have_seeds_of_their_own(self, tiny):
        few, many = (tiny.complete("w3", Sampling(seed=5, n=n, max_tokens=8)) for n in (3, 9))
        assert few == many[:3]
        assert [c.details["seed"] for c in few] == [sample_seed(5, i) for i in range(3)]
        assert len({c.token_ids for c in many}) > 5

    def test_without_a_seed_one_is_drawn_and_told(self, tiny):
        first, second = (tiny.complete("w3", Sampling(max_tokens=30))[0] for _ in range(2))
        assert first.token_ids != second.token_ids
        assert tiny.complete("w3", Sampling(max_tokens=30, seed=first.details["seed"]))[0] == first


class TestEnds:
    @pytest.fixture
    def long(self, tiny):
        return tiny.complete("w3", Sampling(seed=2, max_tokens=30))[0]

    def test_max_tokens_ends_with_length(self, long):
        assert (long.finish_reason, len(long.token_ids), long.usage.completion_tokens) == ("length", 30, 30)

    def test_the_end_of_text_is_a_token_but_no_text(self, tiny, tiny_folder, long):
        end = long.token_ids[10]
        first = long.token_ids.index(end)
        stopped = tiny.complete("w3", Sampling(seed=2, max_tokens=30, stop_token_ids=(end,)))[0]
        assert (stopped.token_ids, stopped.finish_reason) == (long.token_ids[: first + 1], "stop")
        assert stopped.text == tiny.text.text(long.token_ids[:first], tiny.text.prompt("w3"))
        with_end = OpenVINOModel(tiny_folder, name="tiny", eos_token_ids=[end])
        assert with_end.complete("w3", Sampling(seed=2, max_tokens=30))[0] == stopped

    def test_text_ends_before_the_first_stop_string_even_across_tokens(self, tiny, long):
        stop = long.text[9:14]
        stopped = tiny.complete("w3", Sampling(seed=2, max_tokens=30, stop=("never", stop)))[0]
        assert stopped.text == long.text[: long.text.index(stop)]
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == long.token_ids[: len(stopped.token_ids)]
        assert len(stopped.token_ids) < 30


def test_logprobs_are_the_models_own_whatever_the_sampling(tiny, tiny_vocabulary, reference):
    sampling = Sampling(seed=1, max_tokens=5, temperature=0.3, top_k=4, repetition_penalty=1.5, logprobs=0)
    completion = tiny.complete(tiny_vocabulary.prompt, sampling)[0]
    ids = list(tiny_vocabulary.prompt)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        logits = reference.next_logits(tiny_vocabulary.model, ids)
        assert entry.id == token
        assert entry.logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)
        ids.append(token)


@pytest.mark.parametrize(
    ("ask", "refusal"),
    [
        (lambda m: m.score("w3", [" w4"]), "cannot score"),
        (lambda m: m.chat("w3"), "cannot chat"),
        (lambda m: m.complete("w3", Sampling(logprobs=2)), "cannot return 2 log-probabilities"),
        (lambda m: m.complete("w3", Sampling(presence_penalty=1)), "cannot sample with presence_penalty"),
        (lambda m: m.complete("w3", Sampling(frequency_penalty=1)), "cannot sample with frequency_penalty"),
        (lambda m: m.complete("w3", Sampling(logit_bias=((3, 1.0),))), "cannot sample with logit_bias"),
    ],
)
def test_what_its_engine_cannot_do_is_refused(tiny, ask, refusal):
    with pytest.raises(CapabilityError, match=refusal):
        ask(tiny)


def test_a_prompt_too_long_is_refused_before_any_work(tiny):
    with pytest.raises(ValueError, match="64 positions of tiny"):
        tiny.complete([3] * 60, GREEDY)


def test_an_interrupted_batch_leaves_the_model_usable(tiny, monkeypatch):
    expected = tiny.complete("w3", GREEDY)
    monkeypatch.setattr(tiny, "_completion", lambda row, handle: (_ for _ in ()).throw(LanguageModelError("no room")))
    with pytest.raises(LanguageModelError, match="no room"):
        tiny.complete("w3", GREEDY)
    monkeypatch.undo()
    config = tiny._config
    calls = iter(range(3))

    def interrupted(row: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return config(row)

    monkeypatch.setattr(tiny, "_config", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.complete_many(["w3", "w4", "w5"], Sampling(max_tokens=50, seed=0))
    monkeypatch.undo()
    assert tiny.complete("w3", GREEDY) == expected


def test_a_faster_precision_is_another_distribution_and_says_so(tiny_folder):
    answer = OpenVINOModel(tiny_folder, name="tiny", precision="int8").complete("w3", GREEDY)[0]
    assert answer.model == "tiny (int8)"
    assert answer.details["precision"] == "int8"
    with pytest.raises(ValueError, match="precision must be one of 'float32'"):
        OpenVINOModel(tiny_folder, precision="float8")


class TestConversion:
    @pytest.fixture
    def source(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CHAPBOOK_CACHE", str(tmp_path / "cache"))
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "config.json").write_text("{}", encoding="utf-8")
        return tmp_path / "source"

    def test_a_folder_that_is_not_converted_is_named(self, source):
        with pytest.raises(FileNotFoundError, match="from_pretrained converts"):
            OpenVINOModel(source)

    def test_without_uv_the_error_says_what_to_run(self, source, monkeypatch):
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(FileNotFoundError, match="pip install uv") as error:
            module.converted(source)
        assert "optimum-cli export openvino" in str(error.value)

    def test_a_failed_conversion_shows_the_command_and_its_last_words(self, source, tmp_path, monkeypatch):
        failed = subprocess.CompletedProcess([], 1, "", "ValueError: no such architecture")
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
        with pytest.raises(RuntimeError, match="no such architecture") as error:
            module.converted(source)
        assert "--weight-format fp32" in str(error.value)
        assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]

    def test_it_is_done_once_for_each_precision_and_found_again(self, source, tiny_folder, monkeypatch):
        commands: list[list[str]] = []

        def convert(command: list[str], **kwargs: Any) -> Any:
            commands.append(command)
            shutil.copytree(tiny_folder, command[-1], dirs_exist_ok=True)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(subprocess, "run", convert)
        first, again, eight = (
            OpenVINOModel.from_pretrained(source, precision=p, name="tiny") for p in ("float32", "float32", "int8")
        )
        assert len(commands) == 2
        assert commands[1][commands[1].index("--weight-format") + 1] == "int8"
        assert first.complete("w3", GREEDY) == again.complete("w3", GREEDY)
        assert eight.precision == "int8"


@pytest.mark.slow
class TestSmolLM2:
    """Needs the exporter's environment on the first run: some minutes."""

    TOPICS = ("cats", "rain", "the moon", "bread", "chess", "rivers", "a train", "winter", "a violin", "mathematics")
    TASKS = (
        "Write a short sentence about {}.",
        "What is special about {}?",
        "List three words that go with {}.",
        "Explain {} to a child.",
        "Translate '{}' into French.",
    )

    @pytest.fixture
    def both(self):
        return OpenVINOModel.smollm2(), LocalModel.smollm2()

    def test_greedy_text_is_local_models_on_50_prompts(self, both):
        prompts = [task.format(topic) for task in self.TASKS for topic in self.TOPICS]
        answers = [model.chat_many(prompts, Sampling(temperature=0, max_tokens=48)) for model in both]
        differ = [i for i in range(50) if answers[0][i].text != answers[1][i].text]
        for i in differ:
            print(f"{prompts[i]}\n  OpenVINO     {answers[0][i].text!r}\n  transformers {answers[1][i].text!r}")
            # Only a tie within float32's rounding can make two exact engines part.
            ids = [a[i].token_ids for a in answers]
            place = next(k for k, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1])
            context = both[1].chat_token_ids(prompts[i]) + ids[0][:place]
            scores = both[1].score(context, [[ids[0][place]], [ids[1][place]]])
            assert abs(scores[0].logprob - scores[1].logprob) < 1e-3
        assert len(differ) <= 2

    def test_first_tokens_follow_the_softmax(self, both):
        openvino, local = both
        count = 1000
        prompt = local.chat_token_ids("Name an animal.")
        seen = np.bincount([c.token_ids[0] for c in openvino.complete(prompt, Sampling(n=count, max_tokens=1, seed=0))])
        ids = np.flatnonzero(seen).tolist()
        expected = np.exp([s.logprob for s in local.score(prompt, [[i] for i in ids])]) * count
        common = expected >= 5
        observed = [*seen[ids][common], seen[ids][~common].sum()]
        wanted = [*expected[common], count - expected[common].sum()]
        from scipy.stats import chisquare

        assert chisquare(observed, wanted).pvalue > 1e-3


def test_a_stream_gives_what_a_batch_gives_and_takes_no_more_than_it_can_have_under_way(tiny_folder):
    model = OpenVINOModel(tiny_folder, name="tiny", batch_size=4)
    requests = [([3 + i % 3, 4], Sampling(seed=i, max_tokens=1 + i % 7, n=1 + i % 2)) for i in range(30)]
    taken = []

    def watched():
        for i, request in enumerate(requests):
            taken.append(i)
            yield request

    stream = model.complete_each(watched())
    seen = [next(stream)]
    assert len(taken) < 12
    seen += stream
    assert sorted(place for place, _ in seen) == list(range(30))
    expected = model.complete_many([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    ids = {place: [answer.token_ids for answer in answers] for place, answers in seen}
    assert [ids[i] for i in range(30)] == [[answer.token_ids for answer in answers] for answers in expected]


def test_a_stream_may_be_left(tiny):
    expected = tiny.complete("w3", GREEDY)
    stream = tiny.complete_each((f"w{3 + i % 3}", Sampling(seed=i, max_tokens=4 + i)) for i in range(20))
    next(stream)
    stream.close()
    assert tiny.complete("w3", GREEDY) == expected


def test_ids_that_are_no_tokens_are_refused(tiny):
    for prompt in ([3, 12], [3, -1]):
        with pytest.raises(ValueError, match="prompt must hold token ids from 0 on below the 12 of tiny"):
            tiny.complete(prompt, GREEDY)


def test_a_closed_model_says_so(tiny_folder):
    model = OpenVINOModel(tiny_folder, name="tiny")
    stream = model.complete_each((f"w{3 + i % 3}", Sampling(seed=i, max_tokens=4 + i)) for i in range(20))
    next(stream)
    model.close()
    model.close()
    for ask in (lambda: model.complete("w3", GREEDY), lambda: list(stream)):
        with pytest.raises(RuntimeError, match="tiny is closed: load it again"):
            ask()
