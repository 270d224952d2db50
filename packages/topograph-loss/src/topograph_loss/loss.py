"""The Topograph loss and its sum with Dice, with MONAI's argument names.

Symbols   paper     here
          L_topo    `TopographLoss`: 1/(B K) sum_{b,k} sum_c agg_{x in R_c} q(x)
          R_c       the pixels of critical region c of one (sample, class) pair
          q(x)      p[a(x), x], the score of the *predicted* class: high where the network is confidently wrong
          alpha     `lambda_topo`
The regions are constants; the gradient flows through q alone.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from itertools import product
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from chapbook_shared.validate import (
    check_choice,
    check_fraction,
    check_int,
    check_nonnegative,
    check_positive,
    import_extra,
)
from topograph_loss.complex import BORDERS, CONNECTIVITY, RULES, critical_sites, foreground_is_closed
from topograph_loss.hard_labels import (
    NOISES,
    binary_problem,
    channels_are_exclusive,
    hard_prediction,
    hard_target,
    shifted_scores,
)

P = ParamSpec("P")
T = TypeVar("T")

AGGREGATIONS = ("mean", "sum", "max", "min", "rms", "ce")
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class CriticalBatch:
    """The critical pixels of a batch, as indices into the flattened scores (batch, channel, *space)."""

    predicted: Int64[Tensor, " sites"]
    """Where the score of the predicted class is; of the channel, if channels are decided alone."""
    true: Int64[Tensor, " sites"]
    """Where the score of the true class is; likewise."""
    complement: Bool[Tensor, " sites"]
    """Whether the predicted class is the background of its channel, so that its score is 1 - p."""
    region: Int64[Tensor, " sites"]
    pair: Int64[Tensor, " regions"]
    """The pair, sample * K + class, of each region."""


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `torch.compile` out of a function: the graph breaks there.

    `torch.compiler.disable` would import the whole compiler, seconds and 100 MB, for those who do not use it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@outside_graphs
def critical_batch(
    pred: Shaped[Tensor, "batch *labels"],
    target: Shaped[Tensor, "batch *labels"],
    shape: torch.Size,
    *,
    exclusive: bool,
    first_class: int = 0,
    connectivity: str | None = None,
    border: str = "background",
    rule: str = "exact",
    workers: int = 0,
) -> CriticalBatch:
    """Find the critical regions of all (sample, class) pairs, on the CPU; class `first_class` is the first that counts.

    `pred` and `target` are hard labels as `hard_labels` makes them, for scores of `shape` (batch, channel, *space). `workers`
    threads share the pairs (0: this thread); the result does not depend on them.
    """
    batch, channels, pixels = shape[0], shape[1], shape[2:].numel()
    small = torch.uint8 if channels <= 256 else torch.int32
    a, t = (labels.to(small if exclusive else torch.bool).cpu().numpy() for labels in (pred, target))
    classes = range(first_class, channels)
    pairs = list(product(range(batch), classes))

    def solve(pair: tuple[int, int]) -> tuple[np.ndarray, ...]:
        sample, k = pair
        ours, theirs = (binary_problem(labels, sample, k, exclusive=exclusive) for labels in (a, t))
        found = critical_sites(ours, theirs, connectivity=connectivity, border=border, rule=rule)
        site = found.site
        if exclusive:
            channel, true_channel = (labels[sample].ravel()[site].astype(np.int64) for labels in (a, t))
            complement = np.zeros(site.size, np.bool_)
        else:
            channel = true_channel = np.full(site.size, k)
            complement = ~ours.ravel()[site]
        row = sample * channels
        return (row + channel) * pixels + site, (row + true_channel) * pixels + site, complement, found.region

    if workers:
        with ThreadPoolExecutor(workers) as pool:
            solved = list(pool.map(solve, pairs))
    else:
        solved = [solve(pair) for pair in pairs]
    counts = np.array([region.max(initial=-1) + 1 for *_, region in solved])
    offsets = np.cumsum(counts) - counts
    region = np.concatenate([region + offset for (*_, region), offset in zip(solved, offsets, strict=True)])
    predicted, true, complement = (np.concatenate([part[i] for part in solved]) for i in range(3))
    arrays = (predicted, true, complement, region, np.repeat(np.arange(len(pairs)), counts))
    return CriticalBatch(*(torch.from_numpy(array).to(pred.device, non_blocking=True) for array in arrays))


def aggregate(
    q: Float[Tensor, " sites"], region: Int64[Tensor, " sites"], n_regions: int, how: str
) -> Float[Tensor, " regions"]:
    """Gather the sites of each region into one number: mean, sum, max, min, or rms = sqrt(mean of squares)."""
    empty = q.new_zeros(n_regions)
    if how in ("max", "min"):
        return empty.scatter_reduce(0, region, q, f"a{how}", include_self=False)
    total = empty.index_add(0, region, q.square() if how == "rms" else q)
    if how == "sum":
        return total
    mean = total / torch.bincount(region, minlength=n_regions)
    # The clamp keeps the gradient finite at q = 0, where the root has none.
    return mean.clamp_min(torch.finfo(q.dtype).tiny).sqrt() if how == "rms" else mean


class TopographLoss(torch.nn.Module):
    """The topological term: per critical region the mean score of the wrongly predicted class, summed over regions.

    Args:
        include_background: count class 0 too.
        to_onehot_y: the target is a label map (B, 1, *space) or (B, *space) instead of one-hot (B, C, *space).
        sigmoid, softmax, other_act: the activation, at most one. After `sigmoid` each channel is a binary problem of its own.
        aggregation: over the pixels of a region: "mean" (the paper), "sum", "max", "min", "rms", or "ce", the mean cross-entropy.
        connectivity: of the foreground, "fg8" or "fg4" in 2D, "fg26" or "fg6" in 3D; None means the first of each.
        border: "background" puts each image in a frame of background, as the theorem demands; "open" does not (the official scripts).
        rule: "exact"; or "neighbours", which in 3D leaves out the conditions of `contacts.py` and in 2D is the same.
        threshold: of the foreground where a channel is decided alone (one channel, or sigmoid).
        threshold_noise, noise_scale, generator: "uniform" or "normal" draws, of this scale, that move the decision border while
            training; the scores that are penalised stay as they are.
        class_weight: one factor a counted class.
        soft_label: the target holds probabilities; its argmax (or > 0.5) is taken.
        reduction: over the (sample, class) pairs: "mean", "sum", or "none" for a (B, K) tensor.
        workers: threads for the search, 0 for none. The value does not depend on it.

    3D is experimental: zero loss in 3D does not prove that the topology is right.

    The loss holds no state but its weights, uses no collective and reduces over samples like any torch loss: under data parallelism the
    mean over ranks is the global mean if ranks hold equally many samples. On CUDA the order of sums is fixed only under
    `torch.use_deterministic_algorithms(True)`. A NaN or infinite input gives NaN, and ValueError in `torch.autograd` anomaly mode.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        include_background: bool = True,
        to_onehot_y: bool = False,
        sigmoid: bool = False,
        softmax: bool = False,
        other_act: Callable[[Tensor], Tensor] | None = None,
        aggregation: str = "mean",
        connectivity: str | None = None,
        border: str = "background",
        rule: str = "exact",
        threshold: float = 0.5,
        threshold_noise: str | None = None,
        noise_scale: float = 0.0,
        class_weight: Sequence[float] | Tensor | None = None,
        soft_label: bool = False,
        reduction: str = "mean",
        workers: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if sigmoid + softmax + (other_act is not None) > 1:
            raise ValueError("Incompatible values: more than 1 of [sigmoid=True, softmax=True, other_act is not None].")
        check_choice("aggregation", aggregation, AGGREGATIONS)
        check_choice("connectivity", connectivity, (None, *CONNECTIVITY[2], *CONNECTIVITY[3]))
        check_choice("border", border, BORDERS)
        check_choice("rule", rule, RULES)
        check_choice("threshold_noise", threshold_noise, NOISES)
        check_choice("reduction", reduction, REDUCTIONS)
        check_fraction("threshold", threshold)
        check_nonnegative("noise_scale", noise_scale)
        check_int("workers", workers, minimum=0)
        self.reduction = reduction
        self.include_background = include_background
        self.to_onehot_y = to_onehot_y
        self.sigmoid, self.softmax, self.other_act = sigmoid, softmax, other_act
        self.aggregation = aggregation
        self.connectivity, self.border, self.rule = connectivity, border, rule
        self.threshold = threshold
        self.threshold_noise, self.noise_scale, self.generator = threshold_noise, noise_scale, generator
        self.soft_label = soft_label
        self.workers = workers
        weight = None if class_weight is None else torch.as_tensor(class_weight, dtype=torch.float32)
        if weight is not None and (weight.ndim != 1 or not (weight >= 0).all() or weight.isinf().any()):
            raise ValueError(f"class_weight must be a sequence of finite numbers >= 0, got {class_weight!r}")
        self.register_buffer("class_weight", weight)

    def forward(
        self,
        input: Float[Tensor, "batch channel *space"],
        target: Shaped[Tensor, "..."],
        mask: Shaped[Tensor, "..."] | None = None,
    ) -> Float[Tensor, ""] | Float[Tensor, "batch classes"]:
        """The loss, in float32 (float64 for float64 input), always with a gradient graph if `input` has one.

        input: scores (B, C, *space) with two or three spatial axes. target: see the class. mask: (B, 1, *space) or (B, *space), nonzero
        where a pixel is to be *ignored*: it counts as rightly predicted and carries no loss.
        """
        scores, ignore = self._checked(input, mask)
        p = self._activated(scores)
        true = self._hard_target(target, scores, ignore)
        return self._reduced(self._topological(scores, p, true, ignore), self.reduction)

    def _checked(self, input: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Plain scores in at least float32, and the mask as (B, *space)."""
        if not input.is_floating_point():
            raise ValueError(f"input must be scores of a floating type, got {input.dtype}")
        if 0 in input.shape:
            raise ValueError(f"input must have at least one sample, channel and pixel, got shape {tuple(input.shape)}")
        foreground_is_closed(self.connectivity, input.ndim - 2)
        n_channels = input.shape[1]
        if n_channels == 1 and self.softmax:
            raise ValueError("softmax=True needs at least two channels, but input has 1: pass sigmoid=True")
        if n_channels == 1 and not self.include_background:
            raise ValueError("include_background=False needs at least two channels, but input has 1")
        if channels_are_exclusive(n_channels, sigmoid=self.sigmoid) and self.threshold != 0.5:
            raise ValueError(
                f"threshold={self.threshold} has no meaning with {n_channels} exclusive channels: argmax decides"
            )
        n_classes = n_channels - (not self.include_background)
        if self.class_weight is not None and len(self.class_weight) != n_classes:
            raise ValueError(f"class_weight has {len(self.class_weight)} values but {n_classes} classes are counted")
        scores = input.as_subclass(Tensor)  # a MetaTensor's bookkeeping is not needed here
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        if torch.is_anomaly_enabled() and not scores.isfinite().all():
            raise ValueError("input has NaN or infinite scores")
        if mask is None:
            return scores, None
        space = input.shape[2:]
        if mask.shape not in ((len(input), 1, *space), (len(input), *space)):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} but input has {tuple(input.shape)}: it needs one channel"
            )
        return scores, (mask.as_subclass(Tensor) != 0).reshape(len(input), *space)

    def _activated(self, scores: Tensor) -> Tensor:
        if self.softmax:
            return scores.softmax(1)
        if self.sigmoid:
            return scores.sigmoid()
        return scores if self.other_act is None else self.other_act(scores)

    def _hard_target(self, target: Tensor, scores: Tensor, ignore: Tensor | None) -> Tensor:
        return hard_target(
            target.detach().as_subclass(Tensor),
            scores.shape,
            to_onehot_y=self.to_onehot_y,
            exclusive=channels_are_exclusive(scores.shape[1], sigmoid=self.sigmoid),
            soft_label=self.soft_label,
            ignore=ignore,
        )

    def _topological(self, scores: Tensor, p: Tensor, true: Tensor, ignore: Tensor | None) -> Tensor:
        """The loss of each (sample, class) pair, (B, K)."""
        exclusive = channels_are_exclusive(p.shape[1], sigmoid=self.sigmoid)
        decided = p.detach()
        if self.training and self.threshold_noise is not None and self.noise_scale > 0:
            decided = shifted_scores(
                decided,
                exclusive=exclusive,
                noise=self.threshold_noise,
                scale=self.noise_scale,
                generator=self.generator,
            )
        pred = hard_prediction(decided, exclusive=exclusive, threshold=self.threshold)
        if ignore is not None:
            pred = torch.where(ignore if exclusive else ignore.unsqueeze(1), true, pred)
        critical = critical_batch(
            pred,
            true,
            p.shape,
            exclusive=exclusive,
            first_class=0 if self.include_background else 1,
            connectivity=self.connectivity,
            border=self.border,
            rule=self.rule,
            workers=self.workers,
        )
        if self.aggregation == "ce":
            penalty, how = self._cross_entropy(scores, p, critical, exclusive), "mean"
        else:
            penalty, how = _score_of_predicted(p, critical), self.aggregation
        per_region = aggregate(penalty, critical.region, len(critical.pair), how)
        batch, classes = len(p), p.shape[1] - (not self.include_background)
        per_pair = per_region.new_zeros(batch * classes).index_add(0, critical.pair, per_region).view(batch, classes)
        if self.class_weight is not None:
            per_pair = per_pair * self.class_weight.to(per_pair)
        # Zero, or NaN if a score is not finite; it also ties a loss without critical regions to the graph.
        return per_pair + (scores * 0).flatten(1).sum(1, keepdim=True)

    def _cross_entropy(self, scores: Tensor, p: Tensor, critical: CriticalBatch, exclusive: bool) -> Tensor:
        """-log of the score of the true class, from the logits where there are logits."""
        if self.softmax:
            return -scores.log_softmax(1).flatten()[critical.true]
        if self.sigmoid:
            logit = scores.flatten()[critical.predicted]
            return F.softplus(torch.where(critical.complement, -logit, logit))
        of_true = p.flatten()[critical.true] if exclusive else 1 - _score_of_predicted(p, critical)
        return -of_true.clamp_min(torch.finfo(p.dtype).eps).log()

    @staticmethod
    def _reduced(losses: Tensor, reduction: str) -> Tensor:
        if reduction == "none":
            return losses
        return losses.mean() if reduction == "mean" else losses.sum()


def _score_of_predicted(p: Tensor, critical: CriticalBatch) -> Tensor:
    """q at the critical sites."""
    score = p.flatten()[critical.predicted]
    return torch.where(critical.complement, 1 - score, score)


class DiceTopographLoss(TopographLoss):
    """Dice + lambda_topo * Topograph: the loss to train with.

    Args:
        lambda_topo: weight of the topological term (the paper's alpha). A plain attribute: set it to 0 for the warm-up epochs, where the
            search is skipped, and raise it later.
        batch: sum intersections and unions over the batch before dividing, as in MONAI's DiceLoss (the official code's choice).
            With False each sample has its own Dice, and the mean over ranks of a data-parallel run is the global mean.
        smooth: added to numerator and denominator of Dice.
        cldice_weight: share of soft clDice in the pixel term, (1 - w) Dice + w clDice. The official code's default is 0.5. Above 0 it
            needs `pip install 'topograph-loss[monai]'`.
        cldice_iterations: steps of the soft skeleton.
        options: everything `TopographLoss` takes; `reduction` is "mean" or "sum". `class_weight` weighs Dice as well.
    """

    def __init__(
        self,
        *,
        lambda_topo: float = 0.5,
        batch: bool = True,
        smooth: float = 1e-5,
        cldice_weight: float = 0.0,
        cldice_iterations: int = 5,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.reduction == "none":
            raise ValueError("reduction must be 'mean' or 'sum': Dice and Topograph have no common shape")
        check_nonnegative("lambda_topo", lambda_topo)
        check_positive("smooth", smooth)
        check_fraction("cldice_weight", cldice_weight)
        check_int("cldice_iterations", cldice_iterations, minimum=1)
        self.lambda_topo = lambda_topo
        self.batch, self.smooth = batch, smooth
        self.cldice_weight = cldice_weight
        self.cldice: torch.nn.Module | None = None
        if cldice_weight > 0:
            monai = import_extra("monai.losses", "topograph-loss[monai]")
            self.cldice = monai.SoftclDiceLoss(iter_=cldice_iterations, reduction=self.reduction)

    def forward(
        self,
        input: Float[Tensor, "batch channel *space"],
        target: Shaped[Tensor, "..."],
        mask: Shaped[Tensor, "..."] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss, a scalar; arguments as in `TopographLoss.forward`. Ignored pixels leave Dice too."""
        scores, ignore = self._checked(input, mask)
        p = self._activated(scores)
        true = self._hard_target(target, scores, ignore)
        loss = self._pixel_loss(p, true, target, ignore)
        if self.lambda_topo == 0:
            return loss
        topological = self._reduced(self._topological(scores, p, true, ignore), self.reduction)
        return loss + self.lambda_topo * topological

    def _pixel_loss(self, p: Tensor, true: Tensor, target: Tensor, ignore: Tensor | None) -> Tensor:
        if self.soft_label:
            truth = target.as_subclass(Tensor).to(p.dtype)
        elif true.shape == p.shape:
            truth = true.to(p.dtype)
        else:
            truth = F.one_hot(true, p.shape[1]).movedim(-1, 1).to(p.dtype)
        if ignore is not None:
            keep = ~ignore.unsqueeze(1)
            p, truth = torch.where(keep, p, 0), torch.where(keep, truth, 0)
        first = 0 if self.include_background else 1
        p, truth = p[:, first:], truth[:, first:]
        dice = dice_loss(p, truth, batch=self.batch, smooth=self.smooth)
        if self.class_weight is not None:
            dice = dice * self.class_weight.to(dice)
        loss = self._reduced(dice, self.reduction)
        if self.cldice is None:
            return loss
        return (1 - self.cldice_weight) * loss + self.cldice_weight * self.cldice(p, truth)


def dice_loss(
    p: Float[Tensor, "batch classes *space"],
    truth: Float[Tensor, "batch classes *space"],
    *,
    batch: bool,
    smooth: float,
) -> Float[Tensor, " classes"] | Float[Tensor, "batch classes"]:
    """1 - soft Dice per class, over the whole batch or per sample (Milletari et al. 2016, without squares)."""
    axes = [0, *range(2, p.ndim)] if batch else list(range(2, p.ndim))
    intersection = (p * truth).sum(axes)
    return 1 - (2 * intersection + smooth) / (p.sum(axes) + truth.sum(axes) + smooth)
