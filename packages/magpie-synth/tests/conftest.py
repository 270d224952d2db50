"""Models that fit into a test: a tokenizer that knows single bytes, and scripted users and assistants."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chapbook_shared.lm import ScriptedModel

CHATML = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def make_tokenizer(template=CHATML, *, bos="<s>", eos="</s>", special=("<|im_start|>", "<|im_end|>"), merges=()):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)}
    vocabulary |= {first + second: 300 + i for i, (first, second) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, additional_special_tokens=list(special)
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_of():
    """A byte-level tokenizer with the given chat template."""
    return make_tokenizer


@pytest.fixture(scope="session")
def chatml():
    return make_tokenizer()


class Script:
    """Speaks for both sides: what it says depends on the prompt's end and the seed alone."""

    def __init__(self, tokenizer, *, question=None, answer=None):
        self.tokenizer = tokenizer
        self.question = question or (lambda seed: f"Question {seed % 1000003}?")
        self.answer = answer or (lambda text, seed: f"Answer to {len(text)}.")

    def __call__(self, prompt, sampling):
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(list(prompt))
        if text.endswith("<|im_start|>assistant\n"):
            return self.answer(text, sampling.seed)
        return self.question(sampling.seed)


@pytest.fixture
def scripted(chatml):
    """Build a scripted model: `scripted(question=f(seed), answer=f(text, seed))`."""

    def make(question=None, answer=None, **options):
        return ScriptedModel(complete=Script(chatml, question=question, answer=answer), name="tiny", **options)

    return make
