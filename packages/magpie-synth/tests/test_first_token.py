"""Facts about the first generated token, against the softmax itself."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chapbook_shared.lm import Capabilities, Completion, LocalModel, OpenAIModel, ScriptedModel, Server
from magpie_synth import BackendError, InstructionSettings, Magpie, derive_template
from magpie_synth.first_token import suppressed_ids

ROWS = 300


@pytest.fixture(scope="module")
def tiny(chatml):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chatml),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).to(torch.float64)


@pytest.fixture(scope="module")
def logits(tiny, chatml):
    ids = torch.tensor([derive_template(chatml).prompt_ids])
    with torch.inference_mode():
        return tiny(ids).logits[0, -1].numpy()


def first_tokens(model, tokenizer, **settings):
    drawn = []

    class Spy(Magpie):
        def _instruction_record(self, request, completion, template, system):
            drawn.append(completion.token_ids[0])
            return super()._instruction_record(request, completion, template, system)

    Spy(model, tokenizer=tokenizer, instruction=InstructionSettings(max_tokens=3, **settings)).instructions(ROWS)
    return Counter(drawn)


def chi_square(counts, probabilities):
    """Statistic over tokens expected at least five times, the others together; and its degrees of freedom."""
    expected = probabilities * ROWS
    often = expected >= 5
    pairs = [(counts[i], expected[i]) for i in np.flatnonzero(often)]
    rest = expected[~often].sum()
    if rest > 1:
        pairs.append((sum(counts[i] for i in np.flatnonzero(~often)), rest))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs), len(pairs) - 1


def softmax(values):
    weights = np.exp(values - values.max())
    return weights / weights.sum()


class NoBias(LocalModel):
    """As an engine that takes no logit bias."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = Capabilities(**{**vars(self.capabilities), "unsupported": frozenset({"logit_bias"})})


@pytest.mark.parametrize(("kind", "factor"), [(LocalModel, 1.2), (NoBias, 1.0)])
def test_the_first_token_follows_the_softmax_without_what_is_suppressed(tiny, chatml, logits, kind, factor):
    likely = int(logits.argmax())
    banned = chatml.decode([likely])
    ids = suppressed_ids(chatml, [banned])
    altered = logits / factor
    altered[sorted(ids)] = -np.inf
    counts = first_tokens(
        kind(tiny, chatml, eos_token_ids=[]), chatml, suppress_first=(banned,), first_token_temperature=factor
    )
    assert not ids & counts.keys()
    statistic, freedom = chi_square(counts, softmax(altered))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    wrong, freedom = chi_square(counts, softmax(logits))
    assert wrong > freedom + 4 * math.sqrt(2 * freedom)  # the test would notice


def test_it_works_through_a_server_that_takes_a_bias(tiny, chatml, logits):
    banned = chatml.decode([int(logits.argmax())])
    local = LocalModel(tiny, chatml, eos_token_ids=[], name="tiny")
    with Server(local) as server, OpenAIModel("tiny", base_url=server.base_url, dialect="vllm") as model:
        made = Magpie(model, tokenizer=chatml, instruction=InstructionSettings(max_tokens=4, suppress_first=(banned,)))
        records = made.instructions(5)
        assert made.suppressed == len(suppressed_ids(chatml, [banned]))
        bodies = [received.body for received in server.received]
    direct = Magpie(local, tokenizer=chatml, instruction=made.instruction).instructions(5)
    assert [r["raw_instruction"] for r in records] == [r["raw_instruction"] for r in direct]
    assert all(body["max_tokens"] == 1 and len(body["logit_bias"]) == made.suppressed for body in bodies[:5])
    assert all("logit_bias" not in body and body["max_tokens"] == 3 for body in bodies[5:])


def test_all_tokens_that_begin_so_are_found_and_none_is_an_error(tokenizer_of):
    tokenizer = tokenizer_of(merges=[("Ġ", "#"), ("#", "#")])
    texts = {tokenizer.decode([id]) for id in suppressed_ids(tokenizer, ["#"])}
    assert texts == {"#", " #", "##"}
    with pytest.raises(ValueError, match="holds 'no such', with which no token"):
        suppressed_ids(tokenizer, ["no such"])


def test_a_model_with_no_other_first_token_is_an_error(chatml):
    id = chatml.encode("#", add_special_tokens=False)[0]
    can = Capabilities(
        complete=True, token_prompts=True, token_ids=True, seed=True, unsupported=frozenset({"logit_bias"})
    )
    model = ScriptedModel(
        complete=lambda prompt, sampling: Completion("#", "length", "m", token_ids=(id,)), name="m", capabilities=can
    )
    made = Magpie(model, tokenizer=chatml, instruction=InstructionSettings(suppress_first=("#",)))
    with pytest.raises(BackendError, match="drew a suppressed first token 100 times running for 2 of 2 rows"):
        made.instructions(2)
