"""Stricter conditions for a regular node in 3D. Experimental: this rule is a proposal of this package and unproven.

In 2D the neighbour rule is enough. In 3D a false handle that meets one TP and one TN node passes it although it makes a tunnel. So
a wrong region V counts as regular only if, besides, its contact with TP is connected, its contact with TN is connected, and its
relative Euler number chi(cl V) - chi(cl V ∩ cl TP), the alternating count of V's own cells, is 0. All three are necessary for the
inclusions of the paper to be homotopy equivalences near V; whether they suffice is open.
"""

import cc3d
import numpy as np
from jaxtyping import Bool, UInt8

from topograph_loss.complex import FACES, TN, TP, ComponentGraph, wrong_cells


def drop_irregular_contacts(
    regular: Bool[np.ndarray, " ids"], cells: UInt8[np.ndarray, "*cells"], graph: ComponentGraph, *, closed: bool
) -> None:
    """Set `regular` to False, in place, where one of the three conditions fails."""
    regular &= _euler_numbers(cells, graph) == 0
    # With the background closed the roles of TP and TN change.
    lower, upper = (TP, TN) if closed else (TN, TP)
    boxes = cc3d.statistics(graph.labels, no_slice_conversion=True)["bounding_boxes"]
    for node in np.flatnonzero(regular):
        box = _around(boxes[node])
        region, near = graph.labels[box] == node, cells[box]
        below = _faces(region) & (near == lower)
        above = _cofaces(region) & (near == upper)
        regular[node] = _is_connected(below) and _is_connected(above)


def _euler_numbers(cells: np.ndarray, graph: ComponentGraph) -> np.ndarray:
    """Number of cells of even minus of odd codimension, for the wrong regions."""
    sign = np.ones(cells.shape)
    for axis in range(cells.ndim):
        np.moveaxis(sign, axis, 0)[1::2] *= -1
    wrong = wrong_cells(cells)
    return np.bincount(graph.labels[wrong], weights=sign[wrong], minlength=graph.n + 1)


def _around(box: np.ndarray) -> tuple[slice, ...]:
    """The bounding box with at least one more cell on each side, beginning at an even cell."""
    low, high = box[0::2].astype(int), box[1::2].astype(int)
    return tuple(slice(max(a - 2, 0) & ~1, b + 2) for a, b in zip(low, high, strict=True))


def _faces(region: np.ndarray) -> np.ndarray:
    """The region with all faces of its cells: from even cells to the odd ones beside them."""
    grown = region.copy()
    for axis in range(grown.ndim):
        along = np.moveaxis(grown, axis, 0)
        even, odd = along[0::2], along[1::2]
        odd |= even[: len(odd)]
        odd[: len(even) - 1] |= even[1:]
    return grown


def _cofaces(region: np.ndarray) -> np.ndarray:
    """The region with all cells that have a cell of it as a face: from odd cells to the even ones beside them."""
    grown = region.copy()
    for axis in range(grown.ndim):
        along = np.moveaxis(grown, axis, 0)
        even, odd = along[0::2], along[1::2]
        even[: len(odd)] |= odd
        even[1:] |= odd[: len(even) - 1]
    return grown


def _is_connected(contact: np.ndarray) -> bool:
    return cc3d.connected_components(contact, connectivity=FACES[contact.ndim], return_N=True)[1] == 1
