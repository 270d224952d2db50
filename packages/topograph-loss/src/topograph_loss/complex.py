"""The combined image as a cell complex, its component graph, and the critical nodes (Topograph, the combined component graph).

Symbols   paper        here
          P, G         pred, target: the predicted and the true foreground of one class
          TN,FP,FN,TP  classes of a cell: bit 0 is P, bit 1 is G
          G(P, G)      `ComponentGraph`: nodes are the connected regions of equal class, edges their contacts
          V_c          critical nodes: wrong nodes that do not touch exactly one TP and one TN node

The paper thickens the foreground a little, so that every contact is generic, and the official code does so by upsampling 5x. Here
the image is put on the doubled grid instead: 2n-1 cells along an axis of n pixels, even cells for the pixels, odd ones for the edges
and corners between them. An odd cell takes the union (bitwise OR) of the pixels it touches, which is the cell complex of closed
foreground squares: foreground is 8-connected, background 4-connected, and regions of the complex meet through faces only.
Everything here is numpy on one (sample, class) pair and needs no gradient: the graph is a constant of the loss.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import cc3d
import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8

from chapbook_shared.validate import check_choice

TN, FP, FN, TP = 0, 1, 2, 3
FACES: dict[int, Literal[4, 6]] = {2: 4, 3: 6}  # connectivity through faces, in the words of cc3d

CONNECTIVITY = {2: ("fg8", "fg4"), 3: ("fg26", "fg6")}
BORDERS = ("background", "open")
RULES = ("exact", "neighbours")


def foreground_is_closed(connectivity: str | None, ndim: int) -> bool:
    """Whether foreground pixels that meet in a corner are connected; None means that they are.

    Raises ValueError for a connectivity that an image of `ndim` dimensions does not have.
    """
    if ndim not in CONNECTIVITY:
        raise ValueError(f"images must have 2 or 3 spatial dimensions, got {ndim}")
    if connectivity is None:
        return True
    check_choice(f"connectivity of a {ndim}D image", connectivity, CONNECTIVITY[ndim])
    return connectivity == CONNECTIVITY[ndim][0]


def cell_complex(
    pred: Bool[np.ndarray, "*space"],
    target: Bool[np.ndarray, "*space"],
    *,
    connectivity: str | None = None,
    border: str = "background",
) -> UInt8[np.ndarray, "*cells"]:
    """The class of every cell of the doubled grid.

    With `border="background"` the image lies in a frame of one pixel of TN. With 4-connected (6-connected) foreground the
    *background* squares are the closed ones: complement, take the union, complement back.
    """
    check_choice("border", border, BORDERS)
    flip = TN if foreground_is_closed(connectivity, pred.ndim) else TP
    frame = 1 if border == "background" else 0
    cells = np.full([2 * (n + 2 * frame) - 1 for n in pred.shape], TN ^ flip, np.uint8)
    pixels = pixel_view(cells, border)
    np.left_shift(target, 1, out=pixels, dtype=np.uint8)
    pixels |= pred
    pixels ^= flip
    for axis in range(cells.ndim):
        along = np.moveaxis(cells, axis, 0)
        np.bitwise_or(along[:-1:2], along[2::2], out=along[1::2])
    cells ^= flip
    return cells


def pixel_view(cells: np.ndarray, border: str) -> np.ndarray:
    """The cells that are pixels of the image, as a view: the even ones, without the frame."""
    frame = 2 if border == "background" else 0
    return cells[tuple(slice(frame, n - frame, 2) for n in cells.shape)]


@dataclass(frozen=True)
class ComponentGraph:
    """Regions of equal class, and where a wrong region (FP, FN) touches a right one (TP, TN).

    Contacts between two right regions do not bear on anything and are left out; two wrong ones never touch. There is one entry
    in `wrong`, `right` and `right_is_tp` for every pair of touching *cells*, so an edge of the graph appears many times.
    """

    labels: Integer[np.ndarray, "*cells"]
    n: int
    wrong: Integer[np.ndarray, " contacts"]
    right: Integer[np.ndarray, " contacts"]
    right_is_tp: Bool[np.ndarray, " contacts"]


def component_graph(cells: UInt8[np.ndarray, "*cells"]) -> ComponentGraph:
    """Label the regions 1..n and list the contacts. Linear in the number of cells."""
    # cc3d takes 0 for void, hence + 1; it labels all classes in one pass.
    labels, n = cc3d.connected_components(cells + 1, connectivity=FACES[cells.ndim], return_N=True)
    flat_cells, flat_labels = cells.ravel(), labels.ravel()
    is_wrong = wrong_cells(flat_cells)
    wrong, right, right_is_tp = [], [], []
    for axis, length in enumerate(cells.shape):
        step = prod(cells.shape[axis + 1 :])
        low = np.flatnonzero(is_wrong[:-step] ^ is_wrong[step:])
        low = low[(low // step) % length != length - 1]  # the last cell of a row has no neighbour in the next row
        low_is_wrong = is_wrong[low]
        at_right = np.where(low_is_wrong, low + step, low)
        right.append(flat_labels[at_right])
        right_is_tp.append(flat_cells[at_right] == TP)
        wrong.append(flat_labels[np.where(low_is_wrong, low, low + step)])
    return ComponentGraph(labels, int(n), np.concatenate(wrong), np.concatenate(right), np.concatenate(right_is_tp))


def wrong_cells(cells: UInt8[np.ndarray, "*cells"]) -> Bool[np.ndarray, "*cells"]:
    """Cells of class FP or FN: the two bits differ."""
    return ((cells ^ (cells >> 1)) & 1).view(np.bool_)


def regular_nodes(graph: ComponentGraph) -> Bool[np.ndarray, " ids"]:
    """For each id 0..n, whether the node touches exactly one TP and exactly one TN node (the paper's definition of regular).

    Meaningful for wrong nodes only; the others come out False.
    """
    tp, tn = graph.right_is_tp, ~graph.right_is_tp
    touches_one_tp = _has_one_neighbour(graph.wrong[tp], graph.right[tp], graph.n)
    touches_one_tn = _has_one_neighbour(graph.wrong[tn], graph.right[tn], graph.n)
    return touches_one_tp & touches_one_tn


def _has_one_neighbour(node: np.ndarray, neighbour: np.ndarray, n: int) -> np.ndarray:
    some = np.zeros(n + 1, neighbour.dtype)
    some[node] = neighbour  # one of the neighbours, whichever comes last
    one = some > 0
    one[node[some[node] != neighbour]] = False  # and here is another
    return one


@dataclass(frozen=True)
class CriticalSites:
    """The pixels of all critical regions: flat pixel index and region number 0..count-1, in raster order."""

    site: Int64[np.ndarray, " sites"]
    region: Int64[np.ndarray, " sites"]
    count: int
    node: Integer[np.ndarray, " count"]
    """The id of each critical region in the component graph."""


NO_SITES = CriticalSites(np.empty(0, np.int64), np.empty(0, np.int64), 0, np.empty(0, np.int64))


def critical_sites(
    pred: Bool[np.ndarray, "*space"],
    target: Bool[np.ndarray, "*space"],
    *,
    connectivity: str | None = None,
    border: str = "background",
    rule: str = "exact",
) -> CriticalSites:
    """The critical regions of one binary problem.

    In 2D there is none if and only if P∩G -> P, P∩G -> G, P -> P∪G and G -> P∪G are all homotopy equivalences (the paper's
    theorem). In 3D `rule="exact"` adds the conditions of `contacts.py`; `rule="neighbours"` is the paper's rule alone.
    """
    wrong_pixels = np.flatnonzero(pred ^ target)
    if wrong_pixels.size == 0:
        return NO_SITES
    cells = cell_complex(pred, target, connectivity=connectivity, border=border)
    graph = component_graph(cells)
    return critical_sites_of(graph, cells, wrong_pixels, connectivity=connectivity, border=border, rule=rule)


def critical_sites_of(
    graph: ComponentGraph,
    cells: UInt8[np.ndarray, "*cells"],
    wrong_pixels: Int64[np.ndarray, " wrong"],
    *,
    connectivity: str | None,
    border: str,
    rule: str,
) -> CriticalSites:
    """As `critical_sites`, for a graph that is already there."""
    check_choice("rule", rule, RULES)
    regular = regular_nodes(graph)
    if rule == "exact" and cells.ndim == 3:
        from topograph_loss.contacts import drop_irregular_contacts

        drop_irregular_contacts(regular, cells, graph, closed=foreground_is_closed(connectivity, cells.ndim))
    at_pixels = pixel_view(graph.labels, border)
    node = at_pixels[np.unravel_index(wrong_pixels, at_pixels.shape)]
    critical = ~regular[node]
    site, node = wrong_pixels[critical], node[critical]
    present = np.zeros(graph.n + 1, np.bool_)
    present[node] = True  # every critical region has a pixel, so this finds all of them
    number = np.cumsum(present) - 1
    return CriticalSites(site, number[node], int(np.count_nonzero(present)), np.flatnonzero(present))
