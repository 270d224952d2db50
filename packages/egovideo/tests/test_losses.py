"""Losses against their definitions, and two processes against one."""

import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from egovideo import clip_loss, ego_nce, max_margin_loss
from egovideo.losses import same_action


def units(n, dim=5, seed=0):
    return F.normalize(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)


def test_infonce_of_two_pairs_by_hand():
    video, text = torch.eye(2), torch.eye(2)
    assert clip_loss(video, text, 1.0).item() == pytest.approx(math.log(1 + math.exp(-1)))


def test_infonce_is_cross_entropy_both_ways():
    video, text = units(7), units(7, seed=1)
    logits = 3.0 * video @ text.T
    own = torch.arange(7)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    assert clip_loss(video, text, 3.0).item() == pytest.approx(expected.item())


def test_one_pair_costs_nothing():
    video = units(1)
    assert clip_loss(video, video, 10.0).item() == 0
    assert max_margin_loss(video, video).item() == 0


def test_egonce_with_no_shared_action_is_infonce():
    video, text, names = units(6), units(6, seed=1), torch.eye(6)
    assert ego_nce(video, text, 3.0, names, names).item() == pytest.approx(clip_loss(video, text, 3.0).item())


def test_egonce_sums_the_probability_of_all_positives():
    video, text = units(3), units(3, seed=1)
    nouns = torch.tensor([[1, 0], [1, 1], [0, 1]])
    verbs = torch.tensor([[1, 0], [1, 0], [0, 1]])  # 0 and 1 share both; 1 and 2 share a noun alone
    assert same_action(nouns, verbs).tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    loss = 0.0
    for logits in (3.0 * video @ text.T, 3.0 * text @ video.T):
        p = logits.softmax(1)
        loss -= ((p[0, 0] + p[0, 1]).log() + (p[1, 0] + p[1, 1]).log() + p[2, 2].log()) / 3
    assert ego_nce(video, text, 3.0, nouns, verbs).item() == pytest.approx(loss.item() / 2)


def test_everything_positive_costs_nothing():
    ones = torch.ones(4, 1)
    assert ego_nce(units(4), units(4, seed=1), 3.0, ones, ones).item() == pytest.approx(0, abs=1e-12)


def test_max_margin_by_its_definition():
    video, text = units(4), units(4, seed=1)
    s = video @ text.T
    total = sum(
        max(0.0, 0.2 + s[i, j] - s[i, i]) + max(0.0, 0.2 + s[j, i] - s[i, i])
        for i in range(4)
        for j in range(4)
        if i != j
    )
    assert max_margin_loss(video, text).item() == pytest.approx(float(total) / 24)


@pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
def test_saturated_scales_have_finite_gradients(scale):
    video, text = units(4).requires_grad_(), units(4, seed=1).requires_grad_()
    (clip_loss(video, text, scale) + ego_nce(video, text, scale, torch.eye(4), torch.eye(4))).backward()
    assert video.grad.isfinite().all()
    assert text.grad.isfinite().all()


def test_bad_input():
    with pytest.raises(ValueError, match="of one shape and not empty"):
        clip_loss(torch.zeros(0, 3), torch.zeros(0, 3), 1.0)
    with pytest.raises(ValueError, match="margin must be >= 0"):
        max_margin_loss(units(2), units(2), margin=-1.0)


def network():
    torch.manual_seed(3)
    return torch.nn.ModuleDict({"v": torch.nn.Linear(6, 4), "t": torch.nn.Linear(5, 4)}).double()


class Towers(torch.nn.Module):
    def __init__(self, kind, gather):
        super().__init__()
        self.net, self.kind, self.gather = network(), kind, gather
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, video, text, nouns, verbs):
        v, t = F.normalize(self.net["v"](video), dim=1), F.normalize(self.net["t"](text), dim=1)
        if self.kind == "margin":
            return max_margin_loss(v, t, margin=0.9, gather=self.gather) + 0 * self.scale
        if self.kind == "egonce":
            return ego_nce(v, t, self.scale.exp(), nouns, verbs, gather=self.gather)
        return clip_loss(v, t, self.scale.exp(), gather=self.gather)


def data():
    g = torch.Generator().manual_seed(0)
    return (
        torch.randn(7, 6, generator=g, dtype=torch.float64),
        torch.randn(7, 5, generator=g, dtype=torch.float64),
        torch.randint(0, 2, (7, 3), generator=g),
        torch.randint(0, 2, (7, 3), generator=g),
    )


CASES = [(kind, gather) for kind in ("infonce", "egonce", "margin") for gather in ("grad", "local")]


def work(rank, port, split, queue):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    results = []
    for kind, gather in CASES:
        model = DistributedDataParallel(Towers(kind, gather))
        loss = model(*(part.split(split)[rank] for part in data()))
        loss.backward()
        dist.all_reduce(loss.detach())
        results.append((loss.item(), [p.grad.tolist() for p in model.parameters()]))
    queue.put((rank, results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("split", [(4, 3), (1, 6)])
def test_two_ranks_with_uneven_shards_equal_one_process(split):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, port, split, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = dict(queue.get() for _ in ranks)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    for case, (kind, gather) in enumerate(CASES):
        model = Towers(kind, gather)
        loss = model(*data())
        loss.backward()
        assert results[0][case][0] == pytest.approx(
            2 * loss.item()
        )  # all_reduce summed the ranks' shares: their mean is the loss
        # Features of other ranks as constants: DDP's mean is the true gradient divided by the number of ranks.
        factor = 1.0 if gather == "grad" else 0.5
        for rank in range(2):
            for got, parameter in zip(results[rank][case][1], model.parameters(), strict=True):
                if gather == "local" and parameter is model.scale:
                    continue  # the scale is no feature: every rank has all of its gradient
                assert torch.allclose(torch.tensor(got, dtype=torch.float64), factor * parameter.grad, atol=1e-10), (
                    kind,
                    gather,
                )
        assert any(p.grad.abs().sum() > 1e-3 for p in model.parameters())
