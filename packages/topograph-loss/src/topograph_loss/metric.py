"""DIU as a MONAI metric. Needs `pip install 'topograph-loss[monai]'`."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from chapbook_shared.validate import check_choice, import_extra
from topograph_loss.complex import BORDERS, CONNECTIVITY
from topograph_loss.diu import DIU, diu
from topograph_loss.hard_labels import hard_target

if TYPE_CHECKING:
    from monai.metrics.metric import CumulativeIterationMetric
else:
    CumulativeIterationMetric = import_extra("monai.metrics", "topograph-loss[monai]").CumulativeIterationMetric

TERMS = tuple(DIU.__dataclass_fields__)


class DIUMetric(CumulativeIterationMetric):
    """Mean DIU over samples and classes, gathered over ranks like any MONAI metric; lower is better, 0 is right.

    Args:
        include_background: count class 0 too.
        reduction: MONAI's "mean" (default), "sum", "mean_batch", "sum_batch", "mean_channel", "sum_channel" or "none".
        get_not_nans: let `aggregate` return `(metric, not_nans)`.
        num_classes: needed when `y_pred` and `y` are label maps (B, 1, *space).
        per_term: keep the terms of DIU apart; `aggregate` then returns a dict from term to number, with "total".
        connectivity, border: as in `diu`.
    """

    def __init__(
        self,
        include_background: bool = True,
        reduction: str = "mean",
        get_not_nans: bool = False,
        num_classes: int | None = None,
        *,
        per_term: bool = False,
        connectivity: str | None = None,
        border: str = "background",
    ) -> None:
        super().__init__()
        check_choice("connectivity", connectivity, (None, *CONNECTIVITY[2], *CONNECTIVITY[3]))
        check_choice("border", border, BORDERS)
        self.include_background = include_background
        self.reduction = reduction
        self.get_not_nans = get_not_nans
        self.num_classes = num_classes
        self.per_term = per_term
        self.connectivity, self.border = connectivity, border

    def _compute_tensor(
        self, y_pred: Shaped[Tensor, "batch channel *space"], y: Shaped[Tensor, "..."] | None = None, **kwargs: Any
    ) -> Float[Tensor, "batch classes"] | Float[Tensor, "batch classes terms"]:
        """DIU of each sample and class, with a last axis of terms if `per_term`.

        `y_pred` and `y` are one-hot or multi-hot masks of zeros and ones, or label maps with one channel if `num_classes` is set.
        """
        if y is None:
            raise ValueError("y is needed: DIU compares a prediction with a ground truth")
        if 0 in y_pred.shape:
            raise ValueError(
                f"y_pred must have at least one sample, channel and pixel, got shape {tuple(y_pred.shape)}"
            )
        pred, target = self._masks("y_pred", y_pred), self._masks("y", y)
        if pred.shape != target.shape:
            raise ValueError(f"y_pred has shape {tuple(y_pred.shape)} but y has shape {tuple(y.shape)}")
        if not self.include_background:
            if pred.shape[1] == 1:
                raise ValueError("include_background=False needs at least two classes, but y_pred has 1")
            pred, target = pred[:, 1:], target[:, 1:]
        found = [
            [diu(P, G, connectivity=self.connectivity, border=self.border) for P, G in zip(Ps, Gs, strict=True)]
            for Ps, Gs in zip(pred.cpu().numpy(), target.cpu().numpy(), strict=True)
        ]
        if self.per_term:
            counts: list[Any] = [[list(one.as_dict().values()) for one in row] for row in found]
        else:
            counts = [[one.total for one in row] for row in found]
        return torch.tensor(counts, dtype=torch.float32, device=y_pred.device)

    def aggregate(self, reduction: str | None = None) -> Any:
        """Reduce what was gathered since `reset`, over all ranks. `reduction` overrides the constructor's."""
        data = self.get_buffer()
        if not isinstance(data, Tensor):
            raise ValueError("nothing to aggregate: call the metric on at least one batch first")
        how = reduction or self.reduction
        if not self.per_term:
            return self._reduce(data, how)
        terms = {term: self._reduce(data[..., i], how) for i, term in enumerate(TERMS)}
        return {"total": self._reduce(data.sum(-1), how), **terms}

    def _reduce(self, counts: Tensor, how: str) -> Any:
        utils = import_extra("monai.metrics.utils", "topograph-loss[monai]")
        value, not_nans = utils.do_metric_reduction(counts.clone(), how)
        return (value, not_nans) if self.get_not_nans else value

    def _masks(self, name: str, masks: Tensor) -> Tensor:
        """(batch, class, *space), bool."""
        masks = masks.as_subclass(Tensor)
        if self.num_classes is not None and masks.shape[1] == 1:
            shape = torch.Size([len(masks), self.num_classes, *masks.shape[2:]])
            masks = hard_target(masks, shape, to_onehot_y=True, exclusive=False)
        if not ((masks == 0) | (masks == 1)).all():
            raise ValueError(f"{name} must be one-hot masks of zeros and ones; for label maps pass num_classes")
        return masks != 0
