"""A tiny Llama and a word tokenizer with a chat-free format: built here, nothing downloaded."""

from types import SimpleNamespace

import pytest
import torch

WORDS = [
    "Question",
    ":",
    "Answer",
    "<unk>",
    "<eos>",
    "<bos>",
    "who",
    "what",
    "where",
    "is",
    "was",
    "born",
    "did",
    "write",
    "the",
    "father",
    "of",
    "prize",
    "a",
    "in",
    "at",
    "do",
    "not",
    "know",
    "I",
    "answer",
    "this",
    "Ada",
    "Ben",
    "Cora",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hana",
    "paris",
    "rome",
    "oslo",
    "lima",
    "kyiv",
    "baku",
    "novels",
    "poems",
    "plays",
    "baker",
    "miner",
    "pilot",
    "gold",
    "silver",
    "bronze",
    "Unknown",
    "Sorry",
    "cannot",
    "say",
    "that",
    "to",
    "me",
]


def make_tokenizer(chat_template=None):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(dict.fromkeys(WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = chat_template
    return fast


def make_model(seed=0, layers=2, **overrides):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(set(WORDS)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=make_tokenizer().eos_token_id,
        pad_token_id=None,
        **overrides,
    )
    return LlamaForCausalLM(config)


NAMES = ["Ada", "Ben", "Cora", "Dan", "Eve", "Finn", "Gus", "Hana"]
CITIES = ["paris", "rome", "oslo", "lima", "kyiv", "baku", "paris", "rome"]
JOBS = ["baker", "miner", "pilot", "baker", "miner", "pilot", "baker", "miner"]


def make_items(start, stop):
    items = []
    for name, city, job in list(zip(NAMES, CITIES, JOBS, strict=True))[start:stop]:
        items.append({"question": f"where was {name} born", "answer": f"{name} was born in {city}"})
        items.append({"question": f"what did the father of {name} do", "answer": f"the father of {name} was a {job}"})
        items.append({"question": f"who is {name}", "answer": f"{name}"})
    return items


@pytest.fixture
def tiny():
    """What makes the tiny model, its tokenizer and its items."""
    return SimpleNamespace(make_model=make_model, make_tokenizer=make_tokenizer, make_items=make_items)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def forget():
    return make_items(0, 2)[:5]


@pytest.fixture
def retain():
    return make_items(2, 8)
