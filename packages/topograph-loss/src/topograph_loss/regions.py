"""Critical regions with their place and kind, for figures, reports and debugging."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Shaped
from torch import Tensor

from topograph_loss.complex import cell_complex, component_graph, critical_sites_of
from topograph_loss.masks import as_masks

KINDS = ("split", "merge", "missing", "spurious", "hole filled", "hole opened", "tangled")


@dataclass(frozen=True)
class Region:
    """One critical region. `number` is its value in the label map of `CriticalRegions`."""

    number: int
    kind: str
    error: str
    """"FP": predicted but not true, or "FN"."""
    size: int
    """In pixels."""
    centre: tuple[float, ...]
    """Mean pixel coordinates."""
    tp_neighbours: int
    tn_neighbours: int
    """How many rightly predicted foreground and background regions it touches; a harmless region touches one of each."""


@dataclass(frozen=True)
class CriticalRegions:
    """`labels`: the number of the critical region at each pixel, 0 elsewhere. `regions`: one entry a number, in raster order."""

    labels: Int32[np.ndarray, "*space"]
    regions: tuple[Region, ...]

    def __len__(self) -> int:
        return len(self.regions)

    def count(self) -> dict[str, int]:
        """Kind -> number of regions, for the kinds that occur."""
        kinds = [region.kind for region in self.regions]
        return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def critical_regions(
    pred: Shaped[Tensor, "..."] | Shaped[np.ndarray, "..."],
    target: Shaped[Tensor, "..."] | Shaped[np.ndarray, "..."],
    *,
    connectivity: str | None = None,
    border: str = "background",
    rule: str = "exact",
) -> CriticalRegions:
    """The wrong regions of two binary masks, (H, W) or (D, H, W), whose correction changes topology.

    The kind says what the region does to the prediction's topology, pieces first:

    | kind | error | touches |
    |---|---|---|
    | missing / spurious | FN / FP | no piece of foreground: a piece is lost / invented |
    | split / merge | FN / FP | two or more pieces, which it parts / joins |
    | hole filled | FP | one piece and no background: it plugs a hole |
    | hole filled | FN | one piece and several backgrounds: it breaches the wall of a hole, which is lost |
    | hole opened | FN | one piece and no background: it makes a hole |
    | hole opened | FP | one piece and several backgrounds: it closes a loop, which makes a hole |
    | tangled | both | one of each, and yet critical: 3D only, by the stricter rule |

    Arguments as in `TopographLoss`. Raises ValueError as `diu` does.
    """
    P, G = as_masks(pred, target)
    labels = np.zeros(P.shape, np.int32)
    wrong_pixels = np.flatnonzero(P ^ G)
    if wrong_pixels.size == 0:
        return CriticalRegions(labels, ())
    cells = cell_complex(P, G, connectivity=connectivity, border=border)
    graph = component_graph(cells)
    critical = critical_sites_of(graph, cells, wrong_pixels, connectivity=connectivity, border=border, rule=rule)
    labels.ravel()[critical.site] = critical.region + 1
    tp, tn = (
        _neighbour_counts(graph.wrong[side], graph.right[side], graph.n)
        for side in (graph.right_is_tp, ~graph.right_is_tp)
    )
    sizes = np.bincount(critical.region, minlength=critical.count)
    coordinates = np.unravel_index(critical.site, P.shape)
    centres = np.stack(
        [np.bincount(critical.region, weights=axis, minlength=critical.count) / sizes for axis in coordinates], 1
    )
    first = np.zeros(critical.count, np.int64)
    first[critical.region[::-1]] = critical.site[::-1]
    predicted = P.ravel()[first]
    regions = tuple(
        Region(
            number=i + 1,
            kind=_kind(bool(predicted[i]), int(tp[node]), int(tn[node])),
            error="FP" if predicted[i] else "FN",
            size=int(sizes[i]),
            centre=tuple(centres[i].tolist()),
            tp_neighbours=int(tp[node]),
            tn_neighbours=int(tn[node]),
        )
        for i, node in enumerate(critical.node)
    )
    return CriticalRegions(labels, regions)


def _neighbour_counts(node: np.ndarray, neighbour: np.ndarray, n: int) -> np.ndarray:
    # int64: the keys reach n^2, 1e13 for a noisy image of a few million pixels.
    edges = np.unique(node.astype(np.int64) * (n + 1) + neighbour)
    return np.bincount(edges // (n + 1), minlength=n + 1)


def _kind(predicted: bool, tp: int, tn: int) -> str:
    if tp == 0:
        return "spurious" if predicted else "missing"
    if tp > 1:
        return "merge" if predicted else "split"
    if tn == 1:
        return "tangled"
    plugs = tn == 0
    return "hole filled" if predicted == plugs else "hole opened"
