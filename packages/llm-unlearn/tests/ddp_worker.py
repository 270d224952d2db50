"""One process of a two-process gloo run: trains the tiny model and writes its weights. Started by test_distributed."""

import importlib.util
import sys
from pathlib import Path

import torch


def load_conftest():
    spec = importlib.util.spec_from_file_location("tiny_conftest", Path(__file__).parent / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = load_conftest()


def train(output: str, method: str, per_device: int, accumulation: int, epochs: int = 2):
    from llm_unlearn import UnlearnConfig, UnlearnTrainer

    args = UnlearnConfig(
        output_dir=output,
        method=method,
        seed=5,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.0,
        warmup_epochs=0,
        num_train_epochs=epochs,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        padding_free=True,
        rmu_layer=1,
    )
    trainer = UnlearnTrainer(
        tiny.make_model(),
        args,
        forget_dataset=tiny.make_items(0, 2)[:5],  # five items of unequal lengths in global batches of four
        retain_dataset=tiny.make_items(2, 8),
        processing_class=tiny.make_tokenizer(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    output, *methods = sys.argv[1:]
    for name in methods:
        trainer = train(output, name, per_device=1, accumulation=2)
        if trainer.is_world_process_zero():
            state = trainer.model.state_dict()
            torch.save({"state": state, "log": trainer.state.log_history}, Path(output) / f"{name}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
