import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from topograph_loss.complex import (
    FN,
    TP,
    cell_complex,
    component_graph,
    critical_sites,
    pixel_view,
    regular_nodes,
    wrong_cells,
)
from topograph_loss.diu import diu

SETTINGS = [(border, connectivity) for border in ("background", "open") for connectivity in ("fg8", "fg4")]


@st.composite
def mask_pairs(draw, ndim=2, max_side=9):
    shape = draw(hnp.array_shapes(min_dims=ndim, max_dims=ndim, max_side=max_side))
    return draw(hnp.arrays(bool, shape)), draw(hnp.arrays(bool, shape))


def region_map(found, shape):
    labels = np.zeros(int(np.prod(shape)), int)
    labels[found.site] = found.region + 1
    return labels.reshape(shape)


def same_partition(a, b):
    pairs = set(zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    return len(pairs) == len(np.unique(a)) == len(np.unique(b)) and all((x == 0) == (y == 0) for x, y in pairs)


def test_an_edge_between_a_false_positive_and_a_false_negative_is_true_positive():
    cells = cell_complex(np.array([[True, False]]), np.array([[False, True]]), border="open")
    assert cells.tolist() == [[1, TP, 2]]


def test_with_four_connected_foreground_the_same_edge_is_background():
    cells = cell_complex(np.array([[True, False]]), np.array([[False, True]]), border="open", connectivity="fg4")
    assert cells.tolist() == [[1, 0, 2]]


def test_the_frame_is_background_and_the_pixels_keep_their_class():
    P, G = np.array([[1, 1], [0, 1]], bool), np.array([[1, 0], [1, 1]], bool)
    for connectivity in ("fg8", "fg4"):
        cells = cell_complex(P, G, connectivity=connectivity)
        assert cells.shape == (7, 7)
        assert not cells[[0, -1]].any()
        assert not cells[:, [0, -1]].any()
        assert pixel_view(cells, "background").tolist() == [[TP, 1], [FN, TP]]


def test_golden_critical_regions_and_node_counts_in_2d(golden):
    expected, arrays = golden
    images = arrays["cases_2d"]
    assert len(expected["cases_2d"]) == 32
    for case in expected["cases_2d"]:
        name = case["name"]
        P, G = images[f"{name}/prob"] > 0.5, images[f"{name}/gt"] > 0
        for border, connectivity in SETTINGS:
            want = case[f"{border}_{connectivity}"]
            found = critical_sites(P, G, border=border, connectivity=connectivity)
            assert found.count == want["n_critical"], (name, border, connectivity)
            assert same_partition(region_map(found, P.shape), images[f"{name}/crit_{border}_{connectivity}"])
            cells = cell_complex(P, G, border=border, connectivity=connectivity)
            graph = component_graph(cells)
            of_node = np.zeros(graph.n + 1, int)
            of_node[graph.labels] = cells
            assert np.bincount(of_node[1:], minlength=4).tolist() == want["nodes_tn_fp_fn_tp"]


@settings(max_examples=150, deadline=None)
@given(mask_pairs())
def test_critical_regions_equal_those_of_the_thickened_image(reference, masks):
    P, G = masks
    for border, connectivity in SETTINGS:
        found = region_map(critical_sites(P, G, border=border, connectivity=connectivity), P.shape)
        slow = np.zeros(P.shape, int)
        options = {"framed": border == "background", "fully_connected": connectivity == "fg8"}
        for i, mask in enumerate(reference.critical_masks(P, G, **options), 1):
            slow[mask] = i
        assert same_partition(found, slow)


@settings(max_examples=200, deadline=None)
@given(mask_pairs())
def test_no_critical_region_if_and_only_if_diu_is_zero(masks):
    P, G = masks
    for connectivity in ("fg8", "fg4"):
        found = critical_sites(P, G, connectivity=connectivity)
        assert (found.count == 0) == (diu(P, G, connectivity=connectivity).total == 0)


@settings(max_examples=100, deadline=None)
@given(mask_pairs())
def test_critical_regions_are_symmetric_in_prediction_and_target_and_follow_the_image_when_it_turns(masks):
    P, G = masks
    here = region_map(critical_sites(P, G), P.shape)
    assert same_partition(here, region_map(critical_sites(G, P), P.shape))
    assert same_partition(np.rot90(here), region_map(critical_sites(np.rot90(P), np.rot90(G)), P.shape[::-1]))


@settings(max_examples=100, deadline=None)
@given(mask_pairs())
def test_complementing_both_masks_swaps_the_connectivity_on_an_open_border(masks):
    P, G = masks
    eight = critical_sites(P, G, border="open", connectivity="fg8")
    four = critical_sites(~P, ~G, border="open", connectivity="fg4")
    assert same_partition(region_map(eight, P.shape), region_map(four, P.shape))


@settings(max_examples=60, deadline=None)
@given(mask_pairs(ndim=3, max_side=5))
def test_in_3d_the_stricter_rule_only_adds_critical_regions(masks):
    P, G = masks
    for connectivity in ("fg26", "fg6"):
        strict = region_map(critical_sites(P, G, connectivity=connectivity), P.shape) > 0
        plain = region_map(critical_sites(P, G, connectivity=connectivity, rule="neighbours"), P.shape) > 0
        assert (strict | ~plain).all()


@settings(max_examples=60, deadline=None)
@given(mask_pairs(ndim=3, max_side=5))
def test_in_3d_diu_zero_leaves_no_critical_region(masks):
    P, G = masks
    for connectivity in ("fg26", "fg6"):
        if diu(P, G, connectivity=connectivity).total == 0:
            assert critical_sites(P, G, connectivity=connectivity).count == 0


def test_a_handle_in_3d_is_critical_by_the_stricter_rule_alone():
    G = np.zeros((7, 7, 7), bool)
    G[3, 1:6, 1:6] = True
    G[3, 2:5, 2:5] = False
    P = G.copy()
    P[3, 1, 3] = False  # cuts the ring: one TP arc, one TN region, yet the loop is gone
    assert critical_sites(P, G, rule="neighbours").count == 0
    assert critical_sites(P, G).count == 1


def test_in_2d_both_rules_agree(vessels):
    for P, G in zip(*vessels, strict=True):
        a, b = (critical_sites(P, G, rule=rule) for rule in ("exact", "neighbours"))
        assert a.count > 0
        assert np.array_equal(a.site, b.site)


def test_wrong_regions_never_touch_each_other(vessels):
    P, G = vessels[0][0], vessels[1][0]
    for connectivity in ("fg8", "fg4"):
        cells = cell_complex(P, G, connectivity=connectivity)
        wrong = wrong_cells(cells)
        for axis in (0, 1):
            a, b = (np.moveaxis(x, axis, 0) for x in (cells, wrong))
            both = b[:-1] & b[1:]
            assert (a[:-1] == a[1:])[both].all()


def test_regular_means_one_neighbour_of_each_right_class():
    G = np.zeros((5, 9), bool)
    G[2, 1:8] = True
    P = G.copy()
    P[1, 3:5] = True  # a thicker spot: one TP and one TN neighbour
    cells = cell_complex(P, G)
    graph = component_graph(cells)
    assert regular_nodes(graph)[graph.labels[wrong_cells(cells)]].all()


@pytest.mark.slow
def test_a_million_pixels_of_noise_need_64_bit_keys_and_little_memory():
    rng = np.random.default_rng(0)
    P, G = rng.random((2, 1024, 1024)) > 0.5
    assert critical_sites(P, G).count > 100_000
