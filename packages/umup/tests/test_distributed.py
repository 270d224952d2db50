"""Two real gloo processes on the CPU: FSDP2 and DDP keep roles and give the gradients of one process on the whole batch."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")

WORKER = """
    import sys
    import torch
    import torch.distributed as dist
    import umup
    import umup.nn as unn
    from umup.optim import AdamW, check_optimizer, clip_grad_norm_, get_param_groups
    from umup.roles import parameter_roles

    kind = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    def make():
        torch.manual_seed(0)
        return unn.TransformerDecoder(13, 16, 2, 2, scale_seq_len=8).double()

    ids = torch.randint(13, (5, 8))
    whole = make()
    whole.loss(ids).backward()
    wanted = {n: p.grad for n, p in whole.named_parameters()}
    groups = [(g["lr"], g["umup_names"]) for g in get_param_groups(whole, 1.0)]

    if kind.startswith("fsdp2"):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.fsdp import fully_shard
        with torch.device("meta" if kind == "fsdp2-meta" else "cpu"):
            model = make()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        if kind == "fsdp2-meta":  # the way large models are made: no weights, shards, storage, then values
            model.to_empty(device="cpu")
            set_model_state_dict(model, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
        from torch.distributed.fsdp import register_fsdp_forward_method
        register_fsdp_forward_method(model, "loss")
        forward = model.loss
        inner = model
    else:
        model = make()
        from torch.nn.parallel import DistributedDataParallel
        inner = model
        wrapped = DistributedDataParallel(model)
        def forward(x):
            return umup.functional.cross_entropy(wrapped(x)[:, :-1], x[:, 1:])
    assert [(g["lr"], g["umup_names"]) for g in get_param_groups(inner, 1.0)] == groups
    part = ids[:2] if rank == 0 else ids[2:]  # the ranks see 2 and 3 sequences
    with unn.effective_tokens(inner, local=len(part), total=5, averaged_over=2):
        forward(part).backward()
    for name, p in inner.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-7)
    optimizer = AdamW(inner, lr=0.5)
    rms = clip_grad_norm_(inner, 0.5)
    rms = rms.full_tensor() if hasattr(rms, "full_tensor") else rms
    torch.testing.assert_close(rms, clip_grad_norm_(whole, 0.5))
    optimizer.step()
    AdamW(whole, lr=0.5).step()
    check_optimizer(optimizer)
    for (name, p), q in zip(inner.named_parameters(), whole.parameters(), strict=True):
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(full.detach(), q.detach(), rtol=1e-3, atol=1e-3)
    print("rank", rank, "same")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-meta", "ddp"])
def test_two_processes_equal_one(kind, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER), encoding="utf-8")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), kind],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [p.communicate(timeout=120) for p in processes]
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err[-3000:]
        assert "same" in out
