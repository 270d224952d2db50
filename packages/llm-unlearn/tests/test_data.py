import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llm_unlearn.data import (
    Draw,
    DrawSampler,
    RefusalPool,
    UnlearnCollator,
    UnlearnDataset,
    build_example,
    build_prompt,
    check_sets,
    overlap,
)

CHAT = (
    "{% for m in messages %}<unk> {{ m['role'] }} {{ m['content'] }} <eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<unk> assistant {% endif %}"
)


def test_ids_are_prompt_and_answer_with_a_supervised_end(tokenizer):
    example = build_example(tokenizer, {"question": "who is Ada", "answer": "Ada was born"})
    words = tokenizer.convert_ids_to_tokens(list(example.input_ids))
    assert words == ["Question", ":", "who", "is", "Ada", "Answer", ":", "Ada", "was", "born", "<eos>"]
    assert example.prompt_length == 7
    assert example.supervised == 4


def merging_tokenizer():
    """A byte-level tokenizer that merges the colon of `Answer:` with the space after it."""
    vocab = {chr(c): i for i, c in enumerate(range(33, 127))} | {"Ġ": 94, "Ċ": 95, ":Ġ": 96, "<eos>": 97}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[(":", "Ġ")]))
    raw.pre_tokenizer = pre_tokenizers.Split("never-in-the-text", "isolated")
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def test_a_token_that_merges_over_the_border_moves_nothing():
    tokenizer = merging_tokenizer()
    item = {"question": "q", "answer": "a"}
    joined = tokenizer("Question: q\nAnswer: a")["input_ids"]
    example = build_example(tokenizer, item)
    assert len(joined) + 2 == len(example.input_ids)  # the merge of ": " is not made; EOS is added
    assert tokenizer.decode(example.input_ids[: example.prompt_length]) == "Question: q\nAnswer:"
    assert tokenizer.decode(example.input_ids[example.prompt_length :]) == " a<eos>"
    assert list(example.input_ids[: example.prompt_length]) == build_prompt(tokenizer, item)


def test_chat_template_supplies_the_turns_and_its_own_end(tokenizer):
    tokenizer.chat_template = CHAT
    example = build_example(tokenizer, {"question": "who is Ada", "answer": "Ada was born"})
    words = tokenizer.convert_ids_to_tokens(list(example.input_ids[example.prompt_length :]))
    assert words == ["Ada", "was", "born", "<eos>"]
    messages = [{"role": "user", "content": "who is Ada"}, {"role": "assistant", "content": "Ada was born"}]
    assert build_example(tokenizer, {"messages": messages}) == example


def test_all_formats(tokenizer):
    plain = build_example(tokenizer, {"prompt": "who is", "completion": "Ada"})
    assert plain.prompt_length == 2
    text = build_example(tokenizer, {"text": "Ada was born"})
    assert (text.prompt_length, text.supervised) == (0, 3)
    with pytest.raises(ValueError, match="has none of question/answer"):
        build_example(tokenizer, {"quest": "x"})
    with pytest.raises(ValueError, match="has no 'answer'"):
        build_example(tokenizer, {"question": "x"})
    with pytest.raises(ValueError, match="must end with a turn of the assistant"):
        build_example(tokenizer, {"messages": [{"role": "user", "content": "x"}]})


def dataset(tokenizer, forget, retain, **kwargs):
    parts = kwargs.pop("parts", ("forget", "forget_idk", "retain", "retain_idk"))
    return UnlearnDataset(tokenizer, forget, retain, parts=parts, **kwargs)


def test_questions_that_fill_the_length_are_dropped_with_a_count(tokenizer, forget, retain, caplog):
    long = {"question": "Ada " * 30, "answer": "Ben"}
    data = dataset(tokenizer, [*forget, long], retain, max_length=20)
    assert len(data) == len(forget)
    assert "1 of 6 forget items dropped" in caplog.text
    with pytest.raises(ValueError, match="no forget item has an answer token within max_length=20"):
        dataset(tokenizer, [long], retain, max_length=20)


def test_pairs_are_fixed_by_seed_epoch_and_index_and_leave_the_global_generator_alone(tokenizer, forget, retain):
    state = torch.random.get_rng_state()
    data = dataset(tokenizer, forget, retain, seed=3)
    pairs = [[data.pair(Draw(epoch, i)) for i in range(5)] for epoch in range(4)]
    _ = data[Draw(0, 0)]
    assert torch.equal(state, torch.random.get_rng_state())
    again = dataset(tokenizer, forget, retain, seed=3)
    assert pairs == [[again.pair(Draw(epoch, i)) for i in range(5)] for epoch in range(4)]
    assert len({tuple(p) for p in pairs}) == 4  # fresh each epoch
    fixed = dataset(tokenizer, forget, retain, pairing="fixed")
    assert fixed.pair(Draw(0, 1)) == fixed.pair(Draw(7, 1))


def test_more_forget_than_retain_items(tokenizer, retain):
    data = dataset(tokenizer, retain, retain[:1])
    assert all(data[i].examples["retain"] == data[0].examples["retain"] for i in range(len(retain)))


def test_the_same_refusal_answers_both_questions_of_a_sample(tokenizer, forget, retain):
    data = dataset(tokenizer, forget, retain, refusals=RefusalPool(["I do not know", "Sorry I cannot say"]))
    for i in range(5):
        parts = data[Draw(1, i)].examples
        ends = [parts[p].input_ids[parts[p].prompt_length :] for p in ("forget_idk", "retain_idk")]
        assert ends[0] == ends[1]


def test_fillers_and_order():
    sampler = DrawSampler(5, seed=0, multiple_of=4)
    first = list(sampler)
    assert len(first) == len(sampler) == 8
    assert sorted(d.index for d in first if not d.filler) == list(range(5))
    assert sum(d.filler for d in first) == 3
    sampler.epoch = 1
    assert [d.index for d in sampler] != [d.index for d in first]


def collated(tokenizer, forget, retain, packed, positions="answer", filler=False, **kwargs):
    data = dataset(tokenizer, forget, retain, seed=1)
    collator = UnlearnCollator(
        data.parts, dict.fromkeys(data.parts, positions), pad_token_id=0, packed=packed, **kwargs
    )
    return collator([data[Draw(0, 0)], data[Draw(0, 1)], data[Draw(0, 2, filler=filler)]])


@pytest.mark.parametrize("positions", ["answer", "nonpad", "tokens"])
def test_packed_and_padded_batches_hold_the_same_rows(tokenizer, forget, retain, positions):
    packed = collated(tokenizer, forget, retain, True, positions)
    padded = collated(tokenizer, forget, retain, False, positions)
    assert packed["input_ids"].shape == (1, int(padded["attention_mask"].sum()))
    for name in ("targets", "answer", "sequence", "counts"):
        assert torch.equal(packed[name], padded[name])
    for batch in (packed, padded):
        flat = batch["input_ids"].flatten()
        known = batch["targets"] >= 0
        assert torch.equal(flat[batch["rows"][known] + 1], batch["targets"][known])


def test_supervised_rows_are_the_answers_and_padding_is_never_one(tokenizer, forget, retain):
    batch = collated(tokenizer, forget, retain, False, "nonpad")
    tokens = int(batch["attention_mask"].sum()) - len(batch["input_ids"])
    assert len(batch["rows"]) == tokens
    assert batch["counts"][:, 0].sum() == batch["answer"].sum()
    assert batch["answer"].sum() < tokens


def test_padded_positions_count_all_but_the_last_column(tokenizer, forget, retain):
    batch = collated(tokenizer, forget, retain, False, "padded", pad_to=50)
    assert batch["input_ids"].shape == (12, 50)
    assert batch["counts"][:, 1].tolist() == [3 * 49] * 4
    with pytest.raises(ValueError, match="count padding"):
        collated(tokenizer, forget, retain, True, "padded")
    with pytest.raises(ValueError, match="more than pad_to"):
        collated(tokenizer, forget, retain, False, pad_to=5)


def test_a_filler_counts_for_nothing(tokenizer, forget, retain):
    batch = collated(tokenizer, forget, retain, True, filler=True)
    assert batch["part_sequences"] == [2] * 4
    assert len(batch["draws"]) == 2
    assert all(value.dtype != torch.float64 for value in batch.values() if torch.is_tensor(value))  # MPS has none


def test_refusals(tmp_path):
    packaged = RefusalPool()
    assert len(packaged) >= 30
    assert len(set(packaged)) == len(packaged)
    (tmp_path / "own.txt").write_text("Weiß ich nicht.\n\n  知りません \n", encoding="utf-8")
    assert list(RefusalPool(tmp_path / "own.txt")) == ["Weiß ich nicht.", "知りません"]
    with pytest.raises(ValueError, match="pool of refusals is empty"):
        RefusalPool(["  "])
    assert packaged.draw(0, "a") == packaged.draw(0, "a")


def test_overlap_ignores_case_spacing_and_unicode_form(forget, retain):
    twin = {"question": "  WHERE was\nＡda born ", "answer": "elsewhere"}
    assert overlap(forget, [*retain, twin]) == [len(retain)]
    with pytest.warns(UserWarning, match="1 retain items ask a question of the forget set"):
        check_sets(forget, [*retain, twin], needs_retain=True)
    with pytest.raises(ValueError, match="remove them, or pass strict=False"):
        check_sets(forget, [*retain, twin], needs_retain=True, strict=True)


def test_empty_sets(forget):
    with pytest.raises(ValueError, match="forget set is empty"):
        check_sets([], forget, needs_retain=False)
    with pytest.raises(ValueError, match="'ME\\+GD' needs a retain set"):
        check_sets(forget, [], needs_retain=True, method="ME+GD")


def test_plain_texts_cannot_be_refused(tokenizer, retain):
    with pytest.raises(ValueError, match="no question to refuse"):
        dataset(tokenizer, [{"text": "Ada was born in paris"}], retain)
    assert len(dataset(tokenizer, [{"text": "Ada was born"}], retain, parts=("forget", "retain"))) == 1
