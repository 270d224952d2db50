"""Two gloo processes against one: gradients of the loss and the state of the metric, also when the ranks differ in size."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from topograph_loss import DiceTopographLoss

SPLITS = [(2, 2), (1, 3)]


def problem():
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.AvgPool2d(5, 1, 2)(torch.randn(4, 1, 24, 24, generator=generator)) * 5
    noise = torch.nn.AvgPool2d(3, 1, 1)(torch.randn(4, 1, 24, 24, generator=generator))
    return images, (images + noise > 0.2).long()


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(4, 2, 1))


def loss_of(images, labels, model, n_all, world):
    """Per-sample sums over the global number: the mean over ranks, times their number, is the global mean."""
    loss = DiceTopographLoss(softmax=True, to_onehot_y=True, batch=False, reduction="sum", lambda_topo=0.5)
    return loss(model(images), labels) * world / (2 * n_all)


def work(rank, port, split, queue):
    from topograph_loss import DIUMetric

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    images, labels = (part.split(split)[rank] for part in problem())
    model = DistributedDataParallel(network())
    loss_of(images, labels, model, sum(split), 2).backward()
    metric = DIUMetric(include_background=False)
    pred = model(images).argmax(1, keepdim=True)
    metric(torch.cat([pred == 0, pred == 1], 1), torch.cat([labels == 0, labels == 1], 1))
    value = metric.aggregate("sum").item()
    queue.put((rank, [p.grad.tolist() for p in model.parameters()], value, len(metric)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_equal_one_process(split):
    pytest.importorskip("monai")
    from topograph_loss import DIUMetric

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, port, split, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = [queue.get() for _ in ranks]
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0

    images, labels = problem()
    model = network()
    loss_of(images, labels, model, 4, 1).backward()
    pred = model(images).argmax(1, keepdim=True)
    metric = DIUMetric(include_background=False)
    metric(torch.cat([pred == 0, pred == 1], 1), torch.cat([labels == 0, labels == 1], 1))
    want = metric.aggregate("sum").item()
    assert want > 0
    for _, grads, value, gathered in results:
        assert (value, gathered) == (want, 4)
        for got, parameter in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(torch.tensor(got), parameter.grad, atol=1e-6)
            assert parameter.grad.any()
