"""One process of a two-process gloo run: trains the tiny model and writes its weights. Started by test_distributed."""

import copy
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


def train(output: str, method: str, per_device: int, accumulation: int, epochs: int = 2, **settings):
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
        **settings,
    )
    if args.fsdp:
        shard_on_cpu(args)
    trainer = UnlearnTrainer(
        tiny.make_model(),
        args,
        forget_dataset=tiny.make_items(0, 2)[:5],  # five items of unequal lengths in global batches of four
        retain_dataset=tiny.make_items(2, 8),
        processing_class=tiny.make_tokenizer(),
    )
    trainer.train()
    return trainer


def shard_on_cpu(args):
    """accelerate shards on accelerators only, and falls back to DDP on a CPU: tell it that it may."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    state = AcceleratorState(cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
DEEPSPEED = {
    "deepspeed": {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    | dict.fromkeys(AUTO, "auto")
}
KINDS = {"ddp": {}, "fsdp": FSDP, "deepspeed": DEEPSPEED}


if __name__ == "__main__":
    output, *runs = sys.argv[1:]  # such as fsdp:ME+GD
    for kind, name in (run.split(":") for run in runs):
        settings = copy.deepcopy(KINDS[kind])
        if kind == "deepspeed" and name.startswith("NPO"):
            settings["precompute_ref"] = True
        trainer = train(output, name, per_device=1, accumulation=2, **settings)
        scores = trainer.evaluate()
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        sharded = any(type(p).__name__ == "DTensor" for p in trainer.model_wrapped.parameters())
        assert sharded == (kind == "fsdp")
        assert trainer.is_deepspeed_enabled == (kind == "deepspeed")
        if trainer.is_world_process_zero():
            saved = {"state": state, "log": trainer.state.log_history, "scores": scores}
            torch.save(saved, Path(output) / f"{kind}-{name}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
