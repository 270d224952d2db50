"""Steps of the trainer against a plain fine-tuning step on the same tokens and a DPO step of TRL, and a padding-free epoch against a fixed-length loader.

The model is a small Llama with SmolLM2's vocabulary; the data have the lengths of TOFU (prompts of 15 to 30 tokens, answers of 20 to 60).
"""

import contextlib
import io
import random
import sys
import tempfile
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from chapbook_shared.bench import Comparison, compare, main
from llm_unlearn import UnlearnConfig, UnlearnTrainer

VOCAB = 49_152


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {str(i): i for i in range(VOCAB - 6)}
    vocab |= {word: VOCAB - 6 + i for i, word in enumerate(("<eos>", "<unk>", "Question", "Answer", ":"))}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>")


def make_items(n: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)

    def words(low: int, high: int) -> str:
        return " ".join(str(rng.randrange(VOCAB - 6)) for _ in range(rng.randint(low, high)))

    return [{"question": words(15, 30), "answer": words(20, 60)} for _ in range(n)]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def trainer(method: str, items: int, **settings) -> UnlearnTrainer:
    args = UnlearnConfig(
        output_dir=tempfile.mkdtemp(), method=method, use_cpu=True, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=4, num_train_epochs=1, warmup_epochs=0, logging_strategy="no", **settings,
    )  # fmt: skip
    return UnlearnTrainer(
        make_model(), args, forget_dataset=make_items(items, 1), retain_dataset=make_items(items, 2),
        processing_class=make_tokenizer(),
    )  # fmt: skip


def run() -> Iterator[Comparison]:
    transformers_logging.set_verbosity_error()
    for method in ("ME+GD", "GA+GD", "IDK+AP"):
        unlearn = trainer(method, 4)
        data = unlearn.train_dataset
        batch = unlearn.data_collator([data[i] for i in range(4)])
        model = unlearn.model
        plain_inputs = padded([data[i].examples[part] for part in data.parts for i in range(4)])

        def plain(model=model, inputs=plain_inputs):
            model.train()
            model(**inputs, use_cache=False).loss.backward()
            model.zero_grad()

        yield compare(
            f"{method} step, {int(plain_inputs['attention_mask'].sum())} tokens",
            lambda unlearn=unlearn, batch=batch: step(unlearn, unlearn.model, batch), plain, peer_name="plain SFT step, padded to the longest",
            goal=1 / 1.15 if method == "ME+GD" else 1 / 1.1 if method == "IDK+AP" else None, repeats=5,
        )  # fmt: skip

    yield against_trl()
    yield from against_forgetium()

    def epoch(**settings):
        unlearn = trainer("ME+GD", 8, **settings)

        def run():
            with contextlib.redirect_stdout(io.StringIO()):
                unlearn.train()

        return run

    yield compare(
        "ME+GD epoch, 8 + 8 items", epoch(),
        epoch(me_positions="padded", pad_to=500, max_length=500),
        peer_name="padded to 500 as in the official loader", repeats=3,
    )  # fmt: skip


def step(owner, *inputs) -> None:
    owner.model.train()
    loss = owner.compute_loss(*inputs)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    owner.model.zero_grad()


def padded(examples) -> dict[str, torch.Tensor]:
    """Padded to the longest, with labels on the answers."""
    width = max(len(e.input_ids) for e in examples)
    ids = torch.tensor([list(e.input_ids) + [0] * (width - len(e.input_ids)) for e in examples])
    mask = torch.tensor([[1] * len(e.input_ids) + [0] * (width - len(e.input_ids)) for e in examples])
    labels = ids.masked_fill(mask == 0, -100)
    for row, example in enumerate(examples):
        labels[row, : example.prompt_length] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def against_forgetium() -> Iterator[Comparison]:
    """NPO with the LM loss on the retain set, of the one unlearning library for language models on PyPI that installs beside ours."""
    try:
        from forgetium.core.config import UnlearningConfig
        from forgetium.methods.npo import NPOUnlearner
    except ImportError:
        print("not measured: pip install forgetium", file=sys.stderr)
        return
    unlearn = trainer("NPO+GD", 4)
    data = unlearn.train_dataset
    batch = unlearn.data_collator([data[i] for i in range(4)])
    forget, retain = (padded([data[i].examples[part] for i in range(4)]) for part in ("forget", "retain"))
    peer = NPOUnlearner(make_model(), make_tokenizer(), UnlearningConfig(), beta=0.1, retain_weight=1.0)
    peer.prepare()
    torch.testing.assert_close(
        unlearn.compute_loss(unlearn.model, batch), peer.compute_loss(forget, retain)[0], rtol=1e-4, atol=1e-4
    )
    yield compare(
        f"NPO+GD step, {batch['input_ids'].numel()} tokens",
        lambda: step(unlearn, unlearn.model, batch), lambda: step(peer, forget, retain), peer_name="forgetium", repeats=5,
    )  # fmt: skip


def against_trl() -> Comparison:
    """The same four questions with an answer and a refusal each, both with a frozen copy as the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    unlearn = trainer("DPO", 4)
    data = unlearn.train_dataset
    batch = unlearn.data_collator([data[i] for i in range(4)])
    rows = [
        {
            "prompt": f"Question: {item['question']}\nAnswer:",
            "chosen": f" {data.refusals[data[i].refusal]}",
            "rejected": f" {item['answer']}",
        }
        for i, item in enumerate(make_items(4, 1))
    ]
    args = DPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to="none",
        disable_tqdm=True, gradient_checkpointing=False, save_strategy="no",
    )  # fmt: skip
    peer = DPOTrainer(
        make_model(), ref_model=make_model(), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    theirs = next(iter(peer.get_train_dataloader()))

    return compare(
        f"DPO step with a reference, {batch['input_ids'].numel()} tokens",
        lambda: step(unlearn, unlearn.model, batch), lambda: step(peer, peer.model, theirs), peer_name="TRL's DPOTrainer", repeats=5,
    )  # fmt: skip


if __name__ == "__main__":
    main(run)
