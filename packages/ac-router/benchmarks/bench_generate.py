"""Cached greedy generation of a patched model against the plain one: the same weights, the same text length."""

from collections.abc import Iterator

import torch
import transformers

from ac_router import patch_model
from chapbook_shared.bench import Comparison, compare, main


def run() -> Iterator[Comparison]:
    torch.set_num_threads(1)  # Compares work, not how a busy machine schedules threads.
    config = transformers.MixtralConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    models = []
    for patched in (True, False):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config)
        ids = torch.randint(0, 4096, (8, 64))
        if patched:
            patch_model(model).train()(ids)
        models.append(model.eval())
    new = 16
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    for batch in (1, 8):
        yield compare(
            f"generate {new} tokens, batch {batch}, 4 layers, d=512, 8 experts",
            ours=lambda batch=batch: models[0].generate(ids[:batch], **options),
            peer=lambda batch=batch: models[1].generate(ids[:batch], **options),
            peer_name="unpatched",
            goal=0.98,
            repeats=7,
        )


if __name__ == "__main__":
    main(run)
