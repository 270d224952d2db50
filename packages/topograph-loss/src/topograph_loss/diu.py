"""DIU, the discrepancy between intersection and union: the strict count of topological errors (Topograph, the DIU metric).

Symbols   paper            here
          I, U             intersection and union of the closed foregrounds P and G
          i: I -> U        ker_i0, coker_i0 (H0) and, in 3D, ker_i1, coker_i1 (H1)
          j: U^c -> I^c    ker_j0, coker_j0: the same inclusion seen from the background
          xi               total = dim ker i_* + dim coker i_*, over all degrees, coefficients F2

By Alexander duality the top degree of i is H0 of the backgrounds (ker i_{d-1} = coker j_0, coker i_{d-1} = ker j_0), so in 2D all
terms are counts of connected components on the doubled grid, in linear time. Duality needs the image to lie in a frame of background.
The official `TopographMetric` counts surplus neighbours in the graph instead and is not this number.
"""

from dataclasses import asdict, dataclass
from types import ModuleType

import cc3d
import numpy as np
from jaxtyping import Bool, Shaped, UInt8
from torch import Tensor

from chapbook_shared.validate import import_extra
from topograph_loss.complex import FACES, TN, TP, cell_complex, foreground_is_closed, wrong_cells
from topograph_loss.masks import as_masks


@dataclass(frozen=True)
class DIU:
    """The terms of DIU. Each is a number of topological features.

    `ker_i0`: pieces of I that become one in U (gaps and bridges). `coker_i0`: pieces of U without a piece of I (missed or spurious).
    `ker_j0`: background regions of U that are one in I (holes cut off or breached). `coker_j0`: background regions of I that are all
    foreground in U (holes filled or made). `ker_i1`, `coker_i1`: loops of I that close up in U, and loops of U that I has not; in 2D
    they are the j terms already and stay 0 here.
    """

    ker_i0: int
    coker_i0: int
    ker_j0: int
    coker_j0: int
    ker_i1: int = 0
    coker_i1: int = 0

    @property
    def total(self) -> int:
        """xi, the sum of all terms; 0 if and only if (in 2D) the inclusions are homotopy equivalences."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Term -> count."""
        return asdict(self)


def diu(
    pred: Shaped[Tensor, "..."] | Shaped[np.ndarray, "..."],
    target: Shaped[Tensor, "..."] | Shaped[np.ndarray, "..."],
    *,
    connectivity: str | None = None,
    border: str = "background",
) -> DIU:
    """DIU of two binary masks (values 0 and 1, or bool) of shape (H, W) or (D, H, W).

    connectivity: "fg8" (2D) or "fg26" (3D) foreground, the default, or "fg4" / "fg6".
    border: "background" puts the image in a frame of background, as the definition demands; "open" does not, as in the paper's
    tables. The two differ often: say which one a number is.

    3D counts H1 on the wrong cells only, and needs gudhi for the few that do not simplify: `pip install 'topograph-loss[gudhi]'`.
    Raises ValueError for masks that are not binary, differ in shape or have no pixel.
    """
    P, G = as_masks(pred, target)
    if np.array_equal(P, G):
        return DIU(0, 0, 0, 0)
    cells = cell_complex(P, G, connectivity=connectivity, border=border)
    ker_i0, coker_i0 = _ker_coker_h0(cells == TP, cells != TN)
    ker_j0, coker_j0 = _ker_coker_h0(cells == TN, cells != TP)
    if cells.ndim == 2:
        return DIU(ker_i0, coker_i0, ker_j0, coker_j0)
    # The long exact sequence of (U, I): dim H_k(U, I) = coker i_k + ker i_{k-1}. By duality coker i_2 = ker j_0.
    relative = relative_betti_numbers(cells, closed=foreground_is_closed(connectivity, cells.ndim))
    return DIU(ker_i0, coker_i0, ker_j0, coker_j0, ker_i1=relative[2] - ker_j0, coker_i1=relative[1] - ker_i0)


def _ker_coker_h0(small: Bool[np.ndarray, "*cells"], large: Bool[np.ndarray, "*cells"]) -> tuple[int, int]:
    """dim ker and dim coker of H0(small) -> H0(large), small inside large: components are merged, or not hit."""
    connectivity = FACES[small.ndim]
    n_small = cc3d.connected_components(small, connectivity=connectivity, return_N=True)[1]
    labels, n_large = cc3d.connected_components(large, connectivity=connectivity, return_N=True)
    is_hit = np.zeros(int(n_large) + 1, np.bool_)
    is_hit[labels[small]] = True
    hit = int(np.count_nonzero(is_hit))
    return int(n_small) - hit, int(n_large) - hit


def relative_betti_numbers(cells: UInt8[np.ndarray, "*cells"], *, closed: bool = True) -> list[int]:
    """dim H_k(U, I) over F2 for k = 0..d. Their sum is DIU, in any dimension. `closed`: foreground squares are the closed ones.

    By excision the pair splits into the connected regions of wrong cells, each a small problem of its own. Each is first reduced
    (`reduce`). If no two of the cells that remain are incident, they are a basis; what is left after that goes to gudhi.
    """
    # Asked for here, though few regions need it: whether it is there must not depend on the image.
    gudhi = import_extra("gudhi", "topograph-loss[gudhi]")
    wrong = wrong_cells(cells)
    remaining = reduce(wrong)
    labels, n = cc3d.connected_components(wrong, connectivity=FACES[cells.ndim], return_N=True)
    tangled = np.zeros(int(n) + 1, np.bool_)
    for axis in range(cells.ndim):
        along = np.moveaxis(remaining, axis, 0)
        tangled[np.moveaxis(labels, axis, 0)[:-1][along[:-1] & along[1:]]] = True
    free = np.nonzero(remaining & ~tangled[labels])
    # The dimension of a cell is the number of its even coordinates; in the dual complex of the open case, of the odd ones.
    parity = 0 if closed else 1
    degree = np.sum([coordinate % 2 == parity for coordinate in free], axis=0, dtype=np.int64)
    betti = np.bincount(degree, minlength=cells.ndim + 1) if free[0].size else np.zeros(cells.ndim + 1, np.int64)
    if tangled.any():
        boxes = cc3d.statistics(labels, no_slice_conversion=True)["bounding_boxes"].astype(int)
        for region in np.flatnonzero(tangled):
            low, high = boxes[region, 0::2], boxes[region, 1::2]
            box = tuple(slice(max(a - 1, 0), b + 2) for a, b in zip(low, high, strict=True))
            betti += _persistent_betti_numbers(gudhi, cells[box] == TP, labels[box] == region)
    return betti.tolist()


def reduce(wrong: Bool[np.ndarray, "*cells"]) -> Bool[np.ndarray, "*cells"]:
    """Remove pairs of incident cells, one of which has no other coface (or no other face), until there are none.

    Each removal leaves the homology of the chain complex of these cells as it is. A cell has its faces beside it along its even
    axes and its cofaces along its odd ones.
    """
    remaining = wrong.copy()
    before = -1
    while before != (before := int(np.count_nonzero(remaining))):
        for odd in (1, 0):
            incident = np.zeros(wrong.shape, np.uint8)
            for axis in range(wrong.ndim):
                along, there = np.moveaxis(incident, axis, 0), np.moveaxis(remaining, axis, 0)
                along[odd::2][: len(there[odd + 1 :: 2])] += there[odd + 1 :: 2]
                if odd:
                    along[1::2] += there[0::2][: len(along[1::2])]
                else:
                    along[2::2] += there[1::2][: len(along[2::2])]
            lone = remaining & (incident == 1)
            for axis in range(wrong.ndim):
                alone, alive = np.moveaxis(lone, axis, 0), np.moveaxis(remaining, axis, 0)
                for shift in (1, -1):
                    # A lone cell has one partner; if that is still alive, both go. Along one axis no partner is asked for twice.
                    start = odd if odd + shift >= 0 else odd + 2
                    mine = alive[start::2]
                    other = alive[start + shift :: 2]
                    length = min(len(mine), len(other))
                    pair = alone[start::2][:length] & mine[:length] & other[:length]
                    mine[:length] &= ~pair
                    other[:length] &= ~pair
    return remaining


def _persistent_betti_numbers(gudhi: ModuleType, intersection: np.ndarray, region: np.ndarray) -> np.ndarray:
    """The filtration 0 on I, 1 on the region and 2 elsewhere: a bar [0, 1) is a class of ker, a bar [1, 2 or inf) one of coker."""
    filtration = np.where(intersection, 0.0, np.where(region, 1.0, 2.0))
    betti = np.zeros(region.ndim + 2, np.int64)
    for degree, (birth, death) in gudhi.CubicalComplex(top_dimensional_cells=filtration).persistence(
        homology_coeff_field=2
    ):
        if birth == 0 and death == 1:
            betti[degree + 1] += 1
        elif birth == 1 and death > 1:
            betti[degree] += 1
    return betti[:-1]
