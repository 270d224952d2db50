"""Pictures of critical regions. Needs `pip install 'topograph-loss[viz]'`."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from chapbook_shared.validate import import_extra
from topograph_loss.masks import as_masks
from topograph_loss.regions import KINDS, critical_regions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by colour-blind readers; harmless errors are pale, critical ones loud.
COLOURS = {
    "right": "#bdbdbd",
    "harmless": "#efe2c4",
    "split": "#d55e00",
    "merge": "#0072b2",
    "missing": "#e69f00",
    "spurious": "#56b4e9",
    "hole filled": "#009e73",
    "hole opened": "#cc79a7",
    "tangled": "#000000",
}


def show_critical_regions(
    pred: Shaped[Tensor, "..."] | Shaped[np.ndarray, "..."],
    target: Shaped[Tensor, "..."] | Shaped[np.ndarray, "..."],
    *,
    ax: "Axes | None" = None,
    legend: bool = True,
    **options: Any,
) -> "Axes":
    """Draw right foreground grey, harmless errors pale, critical regions in the colour of their kind and ringed; 2D masks only.

    `options` go to `critical_regions`. Returns the axes, new ones if none are given.
    """
    pyplot = import_extra("matplotlib.pyplot", "topograph-loss[viz]")
    colours = import_extra("matplotlib.colors", "topograph-loss[viz]")
    patches = import_extra("matplotlib.patches", "topograph-loss[viz]")
    P, G = as_masks(pred, target)
    if P.ndim != 2:
        raise ValueError(f"only 2D masks can be drawn, got shape {P.shape}: pass a slice")
    found = critical_regions(P, G, **options)
    picture = np.ones((*P.shape, 3))
    picture[P & G] = colours.to_rgb(COLOURS["right"])
    picture[P ^ G] = colours.to_rgb(COLOURS["harmless"])
    if ax is None:
        ax = pyplot.subplots(figsize=(5, 5))[1]
    for region in found.regions:
        picture[found.labels == region.number] = colours.to_rgb(COLOURS[region.kind])
        y, x = region.centre
        # A ring around the region, since many are one pixel wide.
        radius = 2 + np.sqrt(region.size)
        ax.add_patch(patches.Circle((x, y), radius, fill=False, linewidth=1.2, edgecolor=COLOURS[region.kind]))
    ax.imshow(picture, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    if legend:
        count = found.count()
        shown = ["right", "harmless", *(kind for kind in KINDS if kind in count)]
        names = [f"{kind} ({count[kind]})" if kind in count else kind for kind in shown]
        handles = [patches.Patch(facecolor=COLOURS[kind], edgecolor="#777777") for kind in shown]
        ax.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, fontsize=8, frameon=False)
    return ax
