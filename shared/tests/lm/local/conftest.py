"""Tiny models with random weights, in the shapes of the families that people use, and slow, obvious references for them."""

import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import chisquare
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from chapbook_shared.lm import Sampling

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "Yes No maybe",
    "user assistant end system",
    "12 345",
    "naïve café 日本",
]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE that puts <s> before every text, with role markers that its template writes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("<think>", special=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    made.chat_template = TEMPLATE
    return made


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_WINDOW = {"sliding_window": 5}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**_WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {**_WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
    "mistral": ("Mistral", _WINDOW),
    "phi": ("Phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "mamba": ("Mamba", {"state_size": 4, "expand": 2}),
}


def _build(family: str, vocabulary: int) -> Any:
    name, extra = _FAMILIES[family]
    sizes = dict(_SIZES) if family not in ("gpt2",) else {k: v for k, v in _SIZES.items() if k.endswith("token_id")}
    if family == "phi":
        sizes.pop("head_dim")
    config = getattr(transformers, f"{name}Config")(vocab_size=vocabulary, **{**sizes, **extra})
    config._attn_implementation = "eager" if family in ("gemma2", "mamba") else "sdpa"
    torch.manual_seed(len(family))
    class_name = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, class_name)(config).eval()
    if family != "gemma2":  # transformers' plain attention takes a float32 softmax: NaN for padding masked in float64
        model = model.double()
    with torch.no_grad():  # random weights give flat logits: sharpen them, or every choice is a near tie
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn_like(head) * 0.8)
    return model


@pytest.fixture(scope="session")
def build(tokenizer: Any) -> Callable[[str], Any]:
    """A model of a family, in float64 so that batches of different shapes agree to many more digits than a draw looks at."""
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = _build(family, len(tokenizer))
        return made[family]

    return get


@pytest.fixture(scope="session")
def families() -> list[str]:
    return list(_FAMILIES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(_FAMILIES))


@torch.no_grad()
def _next_logits(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()


def _distribution(logits: np.ndarray, s: Sampling, prompt: list[int], reply: list[int]) -> np.ndarray:
    """The distribution of the next token, one rule at a time, token by token."""
    logits = [float(value) for value in logits]
    for token in {*prompt, *reply}:
        logits[token] = (
            logits[token] / s.repetition_penalty if logits[token] > 0 else logits[token] * s.repetition_penalty
        )
    for token, value in s.logit_bias:
        logits[token] += value
    for token in set(reply):
        logits[token] -= s.frequency_penalty * reply.count(token) + s.presence_penalty
    if s.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    weights = {token: math.exp((value - max(logits)) / s.temperature) for token, value in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: -weights[token])
    if s.top_k:
        ranked = ranked[: s.top_k]
    total, mass, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass >= s.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    kept = [token for token in kept if weights[token] >= s.min_p * weights[kept[0]]]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = [weights[token] for token in kept]
    return probabilities / probabilities.sum()


def _sequence_p_value(model: Any, prompt: list[int], sampling: Sampling, drawn: list[tuple[int, ...]]) -> float:
    """p-value of a chi-square test of drawn sequences (all of one length) against the product of the full distributions.

    0 if a sequence came up that has probability 0.
    """
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(len(drawn[0])):
        longer = {}
        for sequence, probability in expected.items():
            following = _distribution(_next_logits(model, prompt + list(sequence)), sampling, prompt, list(sequence))
            for token in np.flatnonzero(following):
                longer[(*sequence, int(token))] = probability * following[token]
        expected = longer
    assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-9)
    seen = Counter(drawn)
    if set(seen) - set(expected):
        return 0.0
    common = [sequence for sequence, p in expected.items() if p * len(drawn) >= 5]
    rare = [sequence for sequence in expected if sequence not in set(common)]
    observed = [seen[sequence] for sequence in common] + [sum(seen[sequence] for sequence in rare)]
    wanted = [expected[sequence] * len(drawn) for sequence in common] + [
        sum(expected[sequence] for sequence in rare) * len(drawn)
    ]
    if wanted[-1] < 5:  # too few to test alone: with the next rarest
        last, want = observed.pop(), wanted.pop()
        observed[-1] += last
        wanted[-1] += want
    if len(wanted) == 1:
        return 1.0
    return float(chisquare(observed, wanted).pvalue)


def _greedy(model: Any, prompt: list[int], sampling: Sampling) -> tuple[int, ...]:
    reply: list[int] = []
    for _ in range(sampling.max_tokens):
        reply.append(int(_distribution(_next_logits(model, prompt + reply), sampling, prompt, reply).argmax()))
    return tuple(reply)


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    return SimpleNamespace(
        next_logits=_next_logits, distribution=_distribution, sequence_p_value=_sequence_p_value, greedy=_greedy
    )


SETTINGS = {
    "defaults": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "frequency below 0": {"frequency_penalty": -1.0},
    "repetition": {"repetition_penalty": 2.0},
    "repetition below 1": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": ((3, 1.5), (5, -1.0))},
    "forbidden": {"logit_bias": ((4, -math.inf), (6, -100.0))},
    "all": {
        "logit_bias": ((7, 1.0),),
        "temperature": 1.5,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
}


@pytest.fixture(params=list(SETTINGS))
def setting(request: pytest.FixtureRequest) -> dict[str, float]:
    return SETTINGS[request.param]


@pytest.fixture(scope="session")
def tiny_vocabulary() -> Any:
    """A model of 12 tokens, none of which ends a text by itself, with its tokenizer of words."""
    names = ["<s>", "</s>", *(f"w{i}" for i in range(2, 12))]
    backend = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="w2"
    )
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    return SimpleNamespace(model=model, tokenizer=tokenizer, prompt=[0, 3, 4, 5, 3])
