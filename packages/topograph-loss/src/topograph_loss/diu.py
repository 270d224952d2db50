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

import cc3d
import numpy as np
from jaxtyping import Bool, Shaped, UInt8
from torch import Tensor

from chapbook_shared.validate import import_extra
from topograph_loss.complex import FACES, TN, TP, cell_complex, wrong_cells
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

    3D counts H1 with gudhi (`pip install 'topograph-loss[gudhi]'`), on the neighbourhoods of the wrong voxels only.
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
    relative = relative_betti_numbers(cells)
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


def relative_betti_numbers(cells: UInt8[np.ndarray, "*cells"]) -> list[int]:
    """dim H_k(U, I) over F2 for k = 0..d, by persistent homology (gudhi). Their sum is DIU, in any dimension.

    By excision the pair splits into the connected regions of wrong cells, each with the TP cells around it: so each region is a
    small problem of its own. There the filtration is 0 on I, 1 on the region and 2 elsewhere: a bar [0, 1) is a
    class of ker, a bar [1, 2 or inf) one of coker.
    """
    gudhi = import_extra("gudhi", "topograph-loss[gudhi]")
    wrong = wrong_cells(cells)
    labels, n = cc3d.connected_components(wrong, connectivity=FACES[cells.ndim], return_N=True)
    boxes = cc3d.statistics(labels, no_slice_conversion=True)["bounding_boxes"].astype(int)
    betti = np.zeros(cells.ndim + 2, int)
    for region in range(1, int(n) + 1):
        low, high = boxes[region, 0::2], boxes[region, 1::2]
        box = tuple(slice(max(a - 1, 0), b + 2) for a, b in zip(low, high, strict=True))
        filtration = np.where(cells[box] == TP, 0.0, np.where(labels[box] == region, 1.0, 2.0))
        bars = gudhi.CubicalComplex(top_dimensional_cells=filtration).persistence(homology_coeff_field=2)
        for degree, (birth, death) in bars:
            if birth == 0 and death == 1:
                betti[degree + 1] += 1
            elif birth == 1 and death > 1:
                betti[degree] += 1
    return betti[:-1].tolist()
