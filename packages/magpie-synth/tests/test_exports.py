"""Facts about what leaves a run."""

import json

import pytest

from chapbook_shared.lm import ScriptedModel
from magpie_synth import Magpie
from magpie_synth.card import write_card
from magpie_synth.exports import read_rows, to_official_schema, to_sharegpt, to_trl, write_rows, write_shards

# the columns of the released sets of one turn
RELEASED = {
    "uuid", "instruction", "response", "conversations", "gen_input_configs", "gen_response_configs", "intent", "knowledge",
    "difficulty", "difficulty_generator", "input_quality", "quality_explanation", "quality_generator", "task_category",
    "other_task_category", "task_category_generator", "llama_guard_2", "instruct_reward", "reward_model",
    "min_neighbor_distance", "repeat_count", "min_similar_uuid", "instruction_length", "response_length", "language",
}  # fmt: skip


@pytest.fixture
def run(scripted, chatml, tmp_path):
    made = Magpie(scripted(), tokenizer=chatml).run(tmp_path / "run", rows=6, turns=2)
    ids = [row.id for row in made.rows()]
    made.put_tags("quality", {ids[0]: {"input_quality": "good", "quality_explanation": "é 你"}})
    made.put_tags("language", {id: {"language": "EN"} for id in ids})
    made.put_tags("neighbors", {id: {"min_neighbor_distance": 0.1 * i} for i, id in enumerate(ids)})
    return made


def test_trl_and_sharegpt_hold_all_turns(run):
    row = next(iter(run))
    assert [m["role"] for m in to_trl(row)["messages"]] == ["user", "assistant"] * 2
    turns = to_sharegpt(row)["conversations"]
    assert [turn["from"] for turn in turns] == ["human", "gpt"] * 2
    assert [turn["value"] for turn in turns] == [m["content"] for m in row["messages"]]


def test_the_official_schema_has_exactly_the_released_names(run):
    row = to_official_schema(next(iter(run)))
    assert set(row) == RELEASED | {"instruction_2", "response_2"}
    assert row["input_quality"] == "good"
    assert row["reward_model"] is None
    older = to_official_schema(next(iter(run)), id_column="conversation_id")
    assert {"conversation_id", "min_similar_conversation_id"} < set(older)
    with pytest.raises(ValueError, match="id_column must be one of"):
        to_official_schema(row, id_column="id")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_files_read_back_as_they_were(run, tmp_path, ending):
    rows = list(run)
    assert write_rows(rows, tmp_path / f"new folder/rows{ending}") == 6
    back = read_rows(tmp_path / f"new folder/rows{ending}")
    assert [{k: row.get(k) for k in rows[0]} for row in back] == [{k: row.get(k) for k in rows[0]} for row in rows]


def test_a_lone_surrogate_does_not_stop_an_export(tmp_path):
    write_rows([{"id": "a", "instruction": "half \ud83d"}], tmp_path / "a.jsonl")
    assert read_rows(tmp_path / "a.jsonl")[0]["instruction"] == "half \ud83d"


def test_shards_share_no_row_and_lose_none(run, tmp_path):
    paths = write_shards(run, tmp_path / "shards", size=4)
    assert [path.name for path in paths] == ["rows-00000-of-00002.parquet", "rows-00001-of-00002.parquet"]
    ids = [row["id"] for path in paths for row in read_rows(path)]
    assert ids == [row.id for row in run.rows()]
    assert write_shards([], tmp_path / "none") == []


def test_files_of_other_kinds_and_broken_lines_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the ending of the file must be one of '.jsonl', '.parquet', got '.csv'"):
        write_rows([], tmp_path / "rows.csv")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
        read_rows(tmp_path / "rows.jsonl")


def test_a_run_is_a_dataset(run):
    dataset = run.dataset()
    assert dataset.num_rows == 6
    assert dataset[0]["messages"] == next(iter(run))["messages"]


def test_the_card_says_how_the_rows_were_made(run, tmp_path):
    path = write_card(run, title="Tiny data", licence="cc-by-4.0")
    text = path.read_text(encoding="utf-8")
    head = text.split("---")[1]
    assert "license: cc-by-4.0" in head
    assert 'language: ["en"]' in head
    for part in (
        "# Tiny data",
        "6 conversations drawn from `tiny`",
        "<|im_start|>user",
        "| 0 | 1 | 1 | 6 | 6 |",
        "| good | 1 |",
    ):
        assert part in text
    plots = sorted(plot.name for plot in path.parent.glob("*.png"))
    assert plots == ["distances.png", "input_quality.png", "language.png", "lengths.png"]
    assert all(f"({name})" in text for name in plots)


def test_stats_say_what_was_dropped_and_where(chatml, tmp_path):
    texts = iter(["One?", "", "one? ", "Two?"])
    model = ScriptedModel(
        complete=lambda prompt, s: "Yes." if chatml.decode(list(prompt)).endswith("assistant\n") else next(texts),
        name="m",
    )
    run = Magpie(model, tokenizer=chatml).run(tmp_path, schedule=[(1.0, 1.0, 2), (1.2, 1.0, 2)])
    stats = json.loads((tmp_path / "stats.json").read_text(encoding="utf-8"))
    assert stats == run.stats()
    assert stats["dropped_instructions"] == {"duplicate": 1, "empty": 1}
    assert stats["rows"] == 2
    assert sum(sum(cell.values()) for cell in stats["by_cell"].values()) == 4


@pytest.mark.slow
def test_trl_trains_on_what_is_exported(run, chatml, tmp_path):
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.manual_seed(0)
    chatml.pad_token = chatml.eos_token
    config = LlamaConfig(
        vocab_size=len(chatml), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    common = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    data = Dataset.from_list([to_trl(row) for row in run]).remove_columns("id")
    sft = SFTTrainer(
        LlamaForCausalLM(config),
        args=SFTConfig(str(tmp_path / "sft"), **common),
        train_dataset=data,
        processing_class=chatml,
    )
    assert sft.train().training_loss > 0
    pairs = [
        {
            "prompt": [{"role": "user", "content": row.instruction}],
            "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "assistant", "content": "No."}],
        }
        for row in run.rows()
    ]
    LlamaForCausalLM(config).save_pretrained(
        tmp_path / "model"
    )  # DPO loads its reference model from where the model is
    dpo = DPOTrainer(
        LlamaForCausalLM.from_pretrained(tmp_path / "model"),
        args=DPOConfig(str(tmp_path / "dpo"), **common),
        train_dataset=Dataset.from_list(pairs),
        processing_class=chatml,
    )
    assert dpo.train().training_loss > 0
