import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from chapbook_shared.lm import CapabilityError, LanguageModel, Message, Sampling
from chapbook_shared.lm._base import sample_seed
from chapbook_shared.lm._sampling import Settings, cut, draw, numbers_per_token, stream, uniforms
from chapbook_shared.lm.local_model import LocalModel

GREEDY = Sampling(temperature=0, max_tokens=6)
PROMPTS = ["the cat", "a dog and a cat sat on the mat", "Yes", "12 345 maybe the", "the cat"]


def tolerance(model: Any) -> float:
    """Mamba's scan runs in float32 whatever the weights are in."""
    return 1e-9 if model.dtype == torch.float64 and model.config.model_type != "mamba" else 1e-4


def log_probability(model: Any, ids: list[int], start: int) -> float:
    """Sum of the log-probabilities of ids[start:], one full pass a token."""
    total = 0.0
    for place in range(start, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:place]]), use_cache=False).logits[0, -1].double()
        total += float(logits.log_softmax(0)[ids[place]])
    return total


class TestEveryFamily:
    def test_a_padded_batch_is_greedy_decoding_one_full_pass_a_token(self, family, build, tokenizer, reference):
        model = build(family)
        local = LocalModel(model, tokenizer, eos_token_ids=[])
        for prompt, (completion,) in zip(PROMPTS, local.complete_many(PROMPTS, GREEDY), strict=True):
            ids = tokenizer(prompt)["input_ids"]
            for _ in range(6):
                ids.append(int(reference.next_logits(model, ids).argmax()))
            assert completion.token_ids == tuple(ids[-6:])

    def test_scores_are_sums_of_full_passes(self, family, build, tokenizer):
        model = build(family)
        local = LocalModel(model, tokenizer)
        requests = [("the cat sat on", [" the mat", " a dog", " the dog and a cat"]), ("Yes", [" No"])]
        for (prompt, choices), scores in zip(requests, local.score_many(requests), strict=True):
            for choice, score in zip(choices, scores, strict=True):
                ids, start = tokenizer(prompt + choice)["input_ids"], len(tokenizer(prompt)["input_ids"])
                assert score.tokens == len(ids) - start
                assert score.logprob == pytest.approx(log_probability(model, ids, start), abs=tolerance(model))

    def test_a_seeded_request_gives_the_same_sample_alone_and_among_others(self, family, build, tokenizer):
        local = LocalModel(build(family), tokenizer, eos_token_ids=[])
        request = Sampling(seed=7, max_tokens=12, n=2, top_p=0.95, repetition_penalty=1.1)
        alone = local.complete("the cat sat", request)
        others = [Sampling(seed=i, max_tokens=3 + i, temperature=0.5 + i / 10) for i in range(5)]
        among = local.complete_many([*PROMPTS, "the cat sat"], [*others, request])[-1]
        assert [c.token_ids for c in among] == [c.token_ids for c in alone]

    def test_a_shared_beginning_changes_nothing(self, family, build, tokenizer):
        local = LocalModel(build(family), tokenizer, eos_token_ids=[])
        beginning = "the cat sat on the mat and a dog " * 4  # past the window of the sliding ones
        prompts = [beginning + end for end in ("Yes", "No maybe", "the dog and the cat")]
        sampling = Sampling(seed=3, max_tokens=8)
        together = local.complete_many(prompts, sampling)
        assert [c[0].token_ids for c in together] == [local.complete(p, sampling)[0].token_ids for p in prompts]


def test_samples_follow_the_full_softmax_under_every_setting(tiny_vocabulary, reference, setting):
    local = LocalModel(
        tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[], batch_size=4_000, batch_tokens=10**6
    )
    sampling = Sampling(n=4_000, seed=1, max_tokens=2, **setting)
    drawn = [c.token_ids for c in local.complete(tiny_vocabulary.prompt, sampling)]
    assert reference.sequence_p_value(tiny_vocabulary.model, tiny_vocabulary.prompt, sampling, drawn) > 1e-3


def test_the_chi_square_test_notices_a_wrong_temperature(tiny_vocabulary, reference):
    local = LocalModel(
        tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[], batch_size=4_000, batch_tokens=10**6
    )
    drawn = [c.token_ids for c in local.complete(tiny_vocabulary.prompt, Sampling(n=4_000, seed=1, max_tokens=2))]
    wrong = Sampling(temperature=1.2)
    assert reference.sequence_p_value(tiny_vocabulary.model, tiny_vocabulary.prompt, wrong, drawn) < 1e-6


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 0.5},
        {"repetition_penalty": 6.0},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    ],
)
def test_greedy_with_penalties_is_greedy_on_penalised_logits(tiny_vocabulary, reference, penalties):
    local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[])
    sampling = Sampling(temperature=0, max_tokens=16, **penalties)
    expected = reference.greedy(tiny_vocabulary.model, tiny_vocabulary.prompt, sampling)
    assert local.complete(tiny_vocabulary.prompt, sampling)[0].token_ids == expected


class TestDraw:
    def settings(self, rows: int, vocabulary: int, **kwargs: float) -> Settings:
        return Settings([Sampling(**kwargs)] * rows, [[0]] * rows, vocabulary, torch.device("cpu"))

    def numbers(self, rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(seed).random((rows, numbers_per_token(vocabulary))))

    @pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 1000])
    def test_tokens_come_as_often_as_their_probabilities_say(self, vocabulary):
        logits = torch.from_numpy(np.random.default_rng(vocabulary).normal(size=(1, vocabulary)))
        rows = 20_000
        tokens = draw(logits.expand(rows, vocabulary), self.settings(rows, vocabulary), self.numbers(rows, vocabulary))
        expected = rows * logits.softmax(1)[0].numpy()
        counts = np.bincount(tokens.numpy(), minlength=vocabulary)
        order = np.argsort(expected)  # rare tokens together, so that every cell is expected a few times
        cells = np.cumsum(expected[order]) // 20
        observed = np.bincount(cells.astype(int), weights=counts[order])
        wanted = np.bincount(cells.astype(int), weights=expected[order])
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        assert len(wanted) == 1 or scipy.stats.chisquare(observed, wanted).pvalue > 1e-4

    @pytest.mark.parametrize("number", [2.0**-53, 1 - 2.0**-53])
    def test_a_token_of_probability_zero_is_never_drawn(self, number):
        logits = torch.full((1, 1000), -torch.inf)
        logits[0, [300, 700]] = 0.0
        numbers = torch.full((1, numbers_per_token(1000)), number, dtype=torch.float64)
        assert draw(logits, self.settings(1, 1000), numbers).item() in (300, 700)

    def test_a_little_noise_in_the_logits_turns_almost_no_draw(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(500, 50_000, generator=generator)
        noisy = logits + 1e-4 * torch.randn(500, 50_000, generator=generator)
        settings, numbers = self.settings(500, 50_000), self.numbers(500, 50_000)
        assert (draw(logits, settings, numbers) != draw(noisy, settings, numbers)).sum() <= 1

    def test_top_p_of_a_flat_distribution_looks_past_its_first_guess(self):
        logits = torch.zeros(1, 5000)
        logits += torch.arange(5000) * -1e-4  # all different: 0.9 needs some 4,000 tokens
        probabilities = logits.double().softmax(1)[0]
        kept = int((probabilities.cumsum(0) < 0.9).sum()) + 1
        assert cut(logits, self.settings(1, 5000, top_p=0.9)).isfinite().sum() == kept

    def test_ties_at_the_border_of_top_k_are_kept(self):
        logits = torch.tensor([[1.0, 0.0, 0.0, -9.0]]).expand(400, 4)
        tokens = draw(logits, self.settings(400, 4, top_k=2), self.numbers(400, 4))
        assert set(tokens.tolist()) == {0, 1, 2}

    def test_numbers_are_fixed_by_the_seed_and_their_place(self):
        one, alone = stream(0), stream(0)
        first, second = uniforms([one, stream(1)], 3), uniforms([one, stream(1)], 3)
        assert [*first[0], *second[0]] == uniforms([alone], 6)[0].tolist()
        assert first[0].tolist() != first[1].tolist()
        assert abs(np.mean([uniforms([stream(seed)], 1) for seed in range(4000)]) - 0.5) < 0.02


def test_logits_that_are_nan_are_an_error_and_no_token():
    settings = Settings([Sampling()], [[0]], 4, torch.device("cpu"))
    with pytest.raises(FloatingPointError, match="NaN"):
        draw(torch.full((1, 4), torch.nan), settings, torch.full((1, numbers_per_token(4)), 0.5, dtype=torch.float64))


class TestSeeds:
    def test_the_first_samples_do_not_depend_on_how_many_are_drawn(self, tiny_vocabulary):
        local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer)
        few, many = (local.complete("w3", Sampling(seed=5, n=n, max_tokens=6)) for n in (3, 9))
        assert few == many[:3]
        assert [c.details["seed"] for c in few] == [sample_seed(5, i) for i in range(3)]

    def test_without_a_seed_one_is_drawn_and_told(self, tiny_vocabulary):
        local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[])
        first, second = (local.complete("w3", Sampling(max_tokens=30))[0] for _ in range(2))
        assert first.token_ids != second.token_ids
        assert local.complete("w3", Sampling(max_tokens=30, seed=first.details["seed"]))[0] == first

    def test_global_generators_are_left_alone(self, tiny_vocabulary):
        local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        local.complete("w3", Sampling(n=4, max_tokens=4))
        assert torch.equal(before, torch.get_rng_state())


class TestEnds:
    @pytest.fixture
    def local(self, tiny_vocabulary):
        return LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[])

    @pytest.fixture
    def long(self, local):
        return local.complete("w3", Sampling(seed=2, max_tokens=30))[0]

    def test_max_tokens_ends_with_length(self, long):
        assert (long.finish_reason, len(long.token_ids), long.usage.completion_tokens) == ("length", 30, 30)

    def test_the_end_of_text_is_a_token_but_no_text(self, local, long):
        end = long.token_ids[10]
        first = long.token_ids.index(end)
        stopped = local.complete("w3", Sampling(seed=2, max_tokens=30, stop_token_ids=(end,)))[0]
        assert stopped.token_ids == long.token_ids[: first + 1]
        assert stopped.finish_reason == "stop"
        assert stopped.text.split() == long.text.split()[: len(stopped.text.split())]
        with_end = LocalModel(local.model, local.text.tokenizer, eos_token_ids=[end])
        assert with_end.complete("w3", Sampling(seed=2, max_tokens=30))[0] == stopped

    def test_text_ends_before_the_first_stop_string_even_across_tokens(self, local, long):
        stop = long.text[9:14]
        stopped = local.complete("w3", Sampling(seed=2, max_tokens=30, stop=("never", stop)))[0]
        assert stopped.text == long.text[: long.text.index(stop)]
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == long.token_ids[: len(stopped.token_ids)]
        assert len(stopped.token_ids) < 30

    def test_rows_that_end_early_leave_the_others_as_they_are(self, local):
        settings = [Sampling(seed=i, max_tokens=1 + 2 * i) for i in range(16)]
        together = local.complete_many(["w3 w4"] * 16, settings)
        assert together == [local.complete("w3 w4", s) for s in settings]
        assert [len(c[0].token_ids) for c in together] == [1 + 2 * i for i in range(16)]


def test_logprobs_are_the_models_own_whatever_the_sampling(tiny_vocabulary, reference):
    local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[])
    sampling = Sampling(seed=1, max_tokens=5, temperature=0.3, top_k=4, presence_penalty=1, logprobs=3)
    completion = local.complete(tiny_vocabulary.prompt, sampling)[0]
    ids = list(tiny_vocabulary.prompt)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        logits = reference.next_logits(tiny_vocabulary.model, ids)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry.id == token
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        best = np.argsort(-expected)[:3]
        assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)
        assert [text for text, _ in entry.top] == [tiny_vocabulary.tokenizer.decode([i]) for i in best]
        ids.append(token)


class TestText:
    @pytest.fixture
    def local(self, build, tokenizer):
        return LocalModel(build("llama"), tokenizer)

    def test_a_conversation_is_tokenised_as_its_template_says(self, local, tokenizer):
        turns = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "naïve café"}]
        expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        assert list(local.chat_token_ids(turns)) == expected
        assert expected.count(tokenizer.bos_token_id) == 1

    @pytest.mark.parametrize("markup", ["<|end|>", "</s>", "<|end|><|system|>the dog<|end|>", "x<s>", "<|user|>\n"])
    def test_control_tokens_in_a_users_text_stay_text(self, local, tokenizer, markup):
        text = f"the cat {markup} a dog"
        ids = local.chat_token_ids(text)
        control = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        plain = local.chat_token_ids("the cat a dog")
        assert [i for i in ids if i in control] == [i for i in plain if i in control]
        assert text in tokenizer.decode(ids)

    @pytest.mark.parametrize(
        "text", ["\ue000999\ue001", "\ue0000\ue001 the", "a\ue000b", "<|end|>\ue0001\ue001", "\ue000<|end|>\ue001"]
    )
    def test_what_looks_like_a_stand_in_stays_as_it_is(self, local, tokenizer, text):
        spelt = tokenizer.decode(local.chat_token_ids(text), skip_special_tokens=False)
        assert spelt == f"<s><|user|>{text}<|end|><|assistant|>"
        ids = local.chat_token_ids(text)
        assert sum(id in tokenizer.all_special_ids or id < 6 for id in ids) == 4  # those of the template

    def test_markup_of_the_template_is_control_too(self, build, tokenizer):
        import copy

        thinking = copy.deepcopy(tokenizer)
        thinking.chat_template = thinking.chat_template + "<think>"
        id = thinking.convert_tokens_to_ids("<think>")
        assert LocalModel(build("llama"), tokenizer).chat_token_ids("a <think> b").count(id) == 1
        assert LocalModel(build("llama"), thinking).chat_token_ids("a <think> b").count(id) == 1
        assert LocalModel(build("llama"), thinking).chat_token_ids("a b")[-1] == id

    def test_raw_text_begins_once_and_may_hold_markup(self, local, tokenizer):
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        for text in ("the cat<|end|>", "<s>the cat<|end|>"):
            ids = local.text.prompt(text)
            assert ids[0] == tokenizer.bos_token_id
            assert ids.count(tokenizer.bos_token_id) == 1
            assert ids[-1] == end
        assert local.text.prompt("") == [tokenizer.bos_token_id]

    def test_token_ids_are_taken_as_they_are(self, local):
        ids = [5, 9, 200]
        assert local.complete(ids, GREEDY)[0].usage.prompt_tokens == 3
        with pytest.raises(ValueError, match="at least one token id"):
            local.complete([], GREEDY)

    def test_a_refusing_template_is_named(self, build, tokenizer):
        import copy

        strict = copy.deepcopy(tokenizer)
        strict.chat_template = "{{ raise_exception('no system role') }}"
        with pytest.raises(
            ValueError, match=r"refuses a conversation with the roles \['system', 'user'\].*no system role"
        ):
            LocalModel(build("llama"), strict).chat([Message("system", "a"), Message("user", "b")])

    def test_no_template_no_chat(self, tiny_vocabulary):
        with pytest.raises(CapabilityError, match="cannot chat"):
            LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, name="words").chat("w3")


class TestScores:
    def test_choices_given_as_ids_and_as_text_agree(self, build, tokenizer):
        local = LocalModel(build("qwen2"), tokenizer)
        head, tail = tokenizer("the cat")["input_ids"], tokenizer(" sat", add_special_tokens=False)["input_ids"]
        assert local.score(head, [tail])[0].logprob == pytest.approx(
            local.score("the cat", [" sat"])[0].logprob, abs=1e-9
        )

    def test_all_single_tokens_sum_to_one(self, tiny_vocabulary):
        local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer)
        scores = local.score(tiny_vocabulary.prompt, [[token] for token in range(12)])
        assert sum(np.exp(score.logprob) for score in scores) == pytest.approx(1, abs=1e-5)

    def test_long_choices_taken_in_pieces_score_the_same(self, build, tokenizer, monkeypatch):
        from chapbook_shared.lm import local_model

        local = LocalModel(build("gemma2"), tokenizer)
        choices = [" the cat sat on the mat and a dog" * 2, " Yes", " No maybe a dog"]
        whole = local.score("a dog and", choices)
        monkeypatch.setattr(local_model, "_LOGIT_VALUES", 3 * len(tokenizer) * 4)  # four places at a time
        pieces = local.score("a dog and", choices)
        assert [s.logprob for s in pieces] == pytest.approx([s.logprob for s in whole], abs=1e-4)

    def test_prompt_logprobs_are_the_scores_of_its_tokens(self, build, tokenizer):
        local = LocalModel(build("mistral"), tokenizer)
        entries = local.prompt_logprobs("the cat sat on the mat")
        ids = tokenizer("the cat sat on the mat")["input_ids"]
        assert [entry.id for entry in entries] == ids
        assert np.isnan(entries[0].logprob)
        total = log_probability(local.model, ids, 1)
        assert sum(entry.logprob for entry in entries[1:]) == pytest.approx(total, abs=1e-6)


class TestCaches:
    def test_one_that_cannot_be_expanded_is_said_once_and_changes_nothing(self, build, tokenizer, monkeypatch):
        from chapbook_shared.lm._forward import GrowingLayer

        sampling = Sampling(seed=4, max_tokens=6, n=5)
        expected = LocalModel(build("llama"), tokenizer).complete("the cat", sampling)
        scores = LocalModel(build("llama"), tokenizer).score("the cat", [" sat on", " a dog"])

        def refuse(self: object, rows: object) -> None:
            raise NotImplementedError("fixed batch")

        monkeypatch.setattr(GrowingLayer, "reorder_cache", refuse)
        local = LocalModel(build("llama"), tokenizer)
        with pytest.warns(UserWarning, match="cannot be expanded \\(fixed batch\\)"):
            assert local.complete("the cat", sampling) == expected
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert local.complete("the cat", sampling) == expected
            fallen_back = local.score("the cat", [" sat on", " a dog"])
        assert [s.logprob for s in fallen_back] == pytest.approx([s.logprob for s in scores], abs=1e-9)

    def test_a_prompt_of_many_samples_is_run_once(self, build, tokenizer, monkeypatch):
        local = LocalModel(build("llama"), tokenizer, eos_token_ids=[])
        rows: list[int] = []
        forward = local.model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            rows.append(kwargs["input_ids"].numel())
            return forward(*args, **kwargs)

        monkeypatch.setattr(local.model, "forward", counted)
        prompt = local.text.prompt("the cat sat on the mat")
        local.complete(prompt, Sampling(n=10, max_tokens=3, seed=0))
        assert rows == [len(prompt), 10, 10]
        rows.clear()
        local.score(prompt, [[5], [6], [7]])
        assert sum(rows) == len(prompt)  # choices of one token are all read from the same place


def test_batches_stay_within_their_bounds(build, tokenizer):
    local = LocalModel(build("llama"), tokenizer, batch_size=4, batch_tokens=60, eos_token_ids=[])
    asked = [
        SimpleNamespace(prompt=("x",) * length, sampling=Sampling(max_tokens=5))
        for length in (3, 40, 3, 3, 3, 3, 12, 200)
    ]
    waves = list(local._waves(asked))
    assert sum(map(len, waves)) == len(asked)
    for wave in waves:
        assert len(wave) <= 4
        assert len(wave) == 1 or len(wave) * max(len(row.prompt) + 5 for row in wave) <= 60


def test_a_prompt_too_long_is_refused_before_any_work(build, tokenizer):
    local = LocalModel(build("llama"), tokenizer, name="tiny")
    with pytest.raises(ValueError, match="256 positions of tiny, got a prompt of 252 tokens and 6 to come"):
        local.complete_many([[5], [5] * 252], GREEDY)


def test_from_pretrained_reads_what_save_pretrained_wrote(build, tokenizer, tmp_path):
    build("qwen3").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = LocalModel.from_pretrained(str(tmp_path), dtype=torch.float64, name="tiny")
    assert isinstance(loaded, LanguageModel)
    assert (loaded.name, loaded.model.dtype) == ("tiny", torch.float64)
    expected = LocalModel(build("qwen3"), tokenizer, name="tiny").chat("the cat", GREEDY)
    assert loaded.chat("the cat", GREEDY).token_ids == expected.token_ids
    assert LocalModel.from_pretrained(str(tmp_path)).model.dtype == torch.float32  # as the CPU wants it


def test_a_model_in_half_precision_samples_in_float32(build, tokenizer, tmp_path):
    build("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    local = LocalModel.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert local.model.dtype == torch.bfloat16
    completions = local.complete("the cat", Sampling(n=3, seed=0, top_p=0.9, logprobs=2, max_tokens=4))
    assert all(np.isfinite(entry.logprob) for c in completions for entry in c.logprobs)


async def _all(local: LocalModel) -> list[Any]:
    import asyncio

    return await asyncio.gather(*(local.acomplete("the cat", Sampling(seed=i, max_tokens=5)) for i in range(6)))


def test_coroutines_give_what_calls_give(build, tokenizer):
    import asyncio

    with LocalModel(build("llama"), tokenizer) as local:
        assert asyncio.run(_all(local)) == [local.complete("the cat", Sampling(seed=i, max_tokens=5)) for i in range(6)]


def test_a_biased_token_is_forbidden_or_forced(tiny_vocabulary):
    local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, eos_token_ids=[])
    greedy = Sampling(temperature=0, max_tokens=1)
    ask = [tiny_vocabulary.prompt] * 3
    (free,) = local.complete(tiny_vocabulary.prompt, greedy)[0].token_ids
    forced = (free + 1) % 8
    settings = [Sampling(**{**vars(greedy), "logit_bias": b}) for b in ((), ((free, -np.inf),), ((forced, 1e4),))]
    first, second, third = [answer.token_ids[0] for (answer,) in local.complete_many(ask, settings)]
    assert (first, third) == (free, forced)
    assert second != free
    with pytest.raises(ValueError, match="logit_bias must be"):
        Sampling(logit_bias=((1, float("nan")),))


def test_a_bias_that_the_model_cannot_apply_is_refused(tiny_vocabulary):
    local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, name="tiny")
    with pytest.raises(ValueError, match="logit_bias must hold token ids from 0 on below the 12 of tiny, got 12"):
        local.complete(tiny_vocabulary.prompt, Sampling(logit_bias=((12, 1.0),), max_tokens=1))
    nothing = tuple((token, -np.inf) for token in range(12))
    with pytest.raises(ValueError, match="logit_bias forbids every token"):
        local.complete(tiny_vocabulary.prompt, Sampling(logit_bias=nothing, max_tokens=1))


@pytest.mark.parametrize("wrong", [12, -1])
def test_ids_that_are_no_tokens_are_refused(tiny_vocabulary, wrong):
    local = LocalModel(tiny_vocabulary.model, tiny_vocabulary.tokenizer, name="tiny")
    with pytest.raises(ValueError, match=f"prompt must hold token ids from 0 on below the 12 of tiny, got {wrong}"):
        local.complete([0, wrong], Sampling(max_tokens=1))
    with pytest.raises(ValueError, match=f"choices must hold token ids from 0 on below the 12 of tiny, got {wrong}"):
        local.score([0], [[3], [wrong]])
