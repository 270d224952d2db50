"""One of several gloo processes, or, with world size 1, the single process they are compared with. Not a test by itself.

usage: run_distributed.py RANK WORLD INIT_FILE OUT
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ac_router import ACMoE, ACRouter, RoutingState, feature_weights, patch_model

torch.set_num_threads(1)
rank, world, init_file, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world)
results = {}


def share(*tensors):
    """Unequal shards: the first 11 rows, the rest."""
    return [tensor if world == 1 else (tensor[:11], tensor[11:])[rank] for tensor in tensors]


generator = torch.Generator().manual_seed(0)
hidden = torch.randn(40, 8, generator=generator, dtype=torch.float64)
prev = torch.rand(40, 4, generator=generator).topk(2).indices
mask = torch.rand(40, generator=generator) > 0.1
local_hidden, local_prev, local_mask = share(hidden, prev, mask)
for dispersion in ("mad", "variance"):
    results[f"weights {dispersion}"] = feature_weights(
        local_hidden, local_prev, 4, mask=local_mask, dispersion=dispersion, process_group="world"
    )
# One process without any token.
some = hidden if world == 1 or rank == 1 else hidden[:0]
some_prev = prev if world == 1 or rank == 1 else prev[:0]
results["weights of one shard"] = feature_weights(some, some_prev, 4, process_group="world")


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(ACMoE(8, 12, 4, 2, stats="ema", process_group="world") for _ in range(3))

    def forward(self, hidden, mask):
        state, aux = RoutingState(mask=mask), 0.0
        for i, layer in enumerate(self.layers):
            update, routing = layer(hidden, state=state, layer=i)
            hidden, aux = hidden + update, aux + routing.aux_loss
        return hidden, aux


def record(name, model):
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"{name} grad {key}"] = parameter.grad.clone()
    for key, buffer in model.named_buffers():
        if "ema" in key:
            results[f"{name} buffer {key}"] = buffer.clone()


stack = Stack().double()
parallel = DistributedDataParallel(stack) if world > 1 else stack
for _ in range(2):
    stack.zero_grad()
    output, aux = parallel(local_hidden, local_mask)
    # DDP averages gradients over processes: weigh by the shard, so that the average is the mean over all tokens.
    (output[local_mask].square().sum() * world / mask.sum() + 0.1 * aux).backward()
record("stack", stack)

router = ACRouter(8, 4, 2, process_group="world")
router(local_hidden.float(), local_prev)
results["router buffer"] = router.adaptive.ema_dispersion.clone()

import transformers  # noqa: E402 - after the cheap part

config = transformers.MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
)
torch.manual_seed(2)
model = patch_model(transformers.MixtralForCausalLM(config), process_group="world").double().train()
model.set_experts_implementation("eager")  # The grouped kernel knows no float64.
for layer in model.model.layers:
    torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
model.gradient_checkpointing_enable({"use_reentrant": False})
ids = torch.randint(0, 64, (4, 10), generator=generator)
local_ids = ids if world == 1 else (ids[:3], ids[3:])[rank]
parallel = DistributedDataParallel(model) if world > 1 else model
logits = parallel(local_ids).logits[:, :-1]
loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), local_ids[:, 1:].reshape(-1), reduction="sum")
(loss * world / (4 * 9)).backward()
record("mixtral", model)

torch.save(results, out)
dist.destroy_process_group()
