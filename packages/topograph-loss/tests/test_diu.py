import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from topograph_loss import DIU, diu
from topograph_loss.complex import cell_complex
from topograph_loss.diu import relative_betti_numbers


@st.composite
def mask_pairs(draw, ndim, max_side):
    shape = draw(hnp.array_shapes(min_dims=ndim, max_dims=ndim, max_side=max_side))
    return draw(hnp.arrays(bool, shape)), draw(hnp.arrays(bool, shape))


def image(*rows):
    return np.array([[char == "#" for char in row] for row in rows])


def test_a_gap_in_a_line_is_one_split():
    target = image(".......", "#######", ".......")
    pred = image(".......", "###.###", ".......")
    assert diu(pred, target) == DIU(ker_i0=1, coker_i0=0, ker_j0=0, coker_j0=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_masks_of_every_type_and_layout_count_the_same(dtype):
    target = torch.zeros(7, 5, dtype=dtype).T
    target[2] = 1
    pred = target.clone().flip(0)
    pred[2, 3] = 0
    assert not target.is_contiguous()
    assert diu(pred, target).ker_i0 == 1
    with pytest.raises(ValueError, match="pred must be a binary mask"):
        diu(2.0 * torch.ones(5, 7).to(torch.bfloat16), target)


def test_a_filled_hole_is_one_lost_background_region():
    ring = image(".....", ".###.", ".#.#.", ".###.", ".....")
    block = image(".....", ".###.", ".###.", ".###.", ".....")
    assert diu(block, ring) == DIU(ker_i0=0, coker_i0=0, ker_j0=0, coker_j0=1)


def test_a_blob_far_away_is_one_spurious_piece():
    target = image("##....", "##....")
    pred = image("##...#", "##....")
    assert diu(pred, target) == DIU(ker_i0=0, coker_i0=1, ker_j0=0, coker_j0=0)


def test_a_bridge_between_two_blobs_is_one_error():
    assert diu(image("##.##", "#####"), image("##.##", "##.##")).total == 1


def test_a_line_shifted_by_one_pixel_is_right():
    assert diu(image(".....", "#####", "....."), image("#####", ".....", ".....")).total == 0


def test_a_thicker_region_is_right():
    assert diu(np.ones((4, 4)), np.pad(np.ones((2, 2)), 1)).total == 0


def test_crossed_diagonals_are_right_with_eight_connected_foreground():
    a, b = image("#.", ".#"), image(".#", "#.")
    assert diu(a, b).total == 0


def test_everything_foreground_against_nothing_is_one_piece():
    assert diu(np.ones((3, 3)), np.zeros((3, 3))).total == 1


def test_the_border_option_changes_the_number():
    target, pred = image("...", "###", "..."), image("...", "#.#", "...")
    assert diu(pred, target).total == 1
    assert diu(pred, target, border="open").total == 2


def test_golden_terms_in_2d(golden):
    expected, arrays = golden
    images = arrays["cases_2d"]
    for case in expected["cases_2d"]:
        for border in ("open", "background"):
            for connectivity in ("fg8", "fg4"):
                want = case[f"{border}_{connectivity}"]
                P, G = images[case["name"] + "/prob"] > 0.5, images[case["name"] + "/gt"]
                got = diu(P, G, border=border, connectivity=connectivity)
                assert got.total == want["diu"]
                assert {k: v for k, v in got.as_dict().items() if k in want} == {k: want[k] for k in list(want)[:4]}


def test_golden_terms_in_3d(golden):
    expected, arrays = golden
    images = arrays["cases_3d"]
    assert len(expected["cases_3d"]) == 10
    for case in expected["cases_3d"]:
        got = diu(images[case["name"] + "/pred"], images[case["name"] + "/gt"])
        assert got.total == case["diu"], case["name"]
        assert [got.ker_i0, got.coker_i0] == case["ker_coker_H0"]
        assert [got.ker_i1, got.coker_i1] == case["ker_coker_H1"]
        assert [got.coker_j0, got.ker_j0] == case["ker_coker_H2"]


@settings(max_examples=150, deadline=None)
@given(mask_pairs(ndim=2, max_side=9))
def test_terms_equal_those_of_the_thickened_image(reference, masks):
    P, G = masks
    for border in ("background", "open"):
        for connectivity in ("fg8", "fg4"):
            options = {"framed": border == "background", "fully_connected": connectivity == "fg8"}
            got = diu(P, G, border=border, connectivity=connectivity)
            assert list(got.as_dict().values())[:4] == reference.diu_terms(P, G, **options)


@settings(max_examples=100, deadline=None)
@given(mask_pairs(ndim=2, max_side=8))
def test_in_2d_diu_is_the_dimension_of_relative_homology(masks):
    P, G = masks
    for connectivity in ("fg8", "fg4"):
        assert diu(P, G, connectivity=connectivity).total == sum(
            relative_betti_numbers(cell_complex(P, G, connectivity=connectivity), closed=connectivity == "fg8")
        )


def two_step_persistence(P, G, connectivity):
    """ker and coker of every degree from one filtration of the whole volume: 0 on I, 1 on U, 2 elsewhere."""
    gudhi = pytest.importorskip("gudhi")
    cells = cell_complex(P, G, connectivity=connectivity)
    steps = np.where(cells == 3, 0.0, np.where(cells > 0, 1.0, 2.0))
    counts = np.zeros((cells.ndim, 2), int)
    for degree, (birth, death) in gudhi.CubicalComplex(top_dimensional_cells=steps).persistence(homology_coeff_field=2):
        if birth == 0 and death == 1:
            counts[degree, 0] += 1
        elif birth == 1 and death > 1:
            counts[degree, 1] += 1
    return counts


@settings(max_examples=60, deadline=None)
@given(mask_pairs(ndim=3, max_side=5))
def test_in_3d_all_terms_equal_those_of_one_filtration_of_the_volume(masks):
    P, G = masks
    for connectivity in ("fg26", "fg6"):
        got = diu(P, G, connectivity=connectivity)
        want = two_step_persistence(P, G, connectivity)
        assert [[got.ker_i0, got.coker_i0], [got.ker_i1, got.coker_i1], [got.coker_j0, got.ker_j0]] == want.tolist()


@settings(max_examples=60, deadline=None)
@given(mask_pairs(ndim=2, max_side=8))
def test_diu_is_symmetric_and_zero_for_equal_masks(masks):
    P, G = masks
    assert diu(P, G) == diu(G, P)
    assert diu(P, P).total == 0


def test_tensors_arrays_integers_and_booleans_give_the_same():
    rng = np.random.default_rng(0)
    P, G = rng.random((2, 12, 12)) > 0.5
    want = diu(P, G)
    assert want.total > 0
    for kind in (np.uint8, np.int64, np.float32):
        assert diu(P.astype(kind), G.astype(kind)) == want
    assert diu(torch.from_numpy(P), torch.from_numpy(G).float().requires_grad_()) == want
    assert diu(np.asfortranarray(P), G[::1, ::-1][:, ::-1]) == want


@pytest.mark.parametrize(
    ("pred", "target", "message"),
    [
        (np.zeros((3, 3)), np.zeros((3, 4)), r"pred has shape \(3, 3\) but target has shape \(3, 4\)"),
        (np.full((3, 3), 0.5), np.zeros((3, 3)), "pred must be a binary mask of zeros and ones, got a value 0.5"),
        (np.zeros((3, 3)), np.full((3, 3), np.nan), "target must be a binary mask"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "at least one pixel"),
        (np.zeros(3), np.zeros(3), "2 or 3 dimensions"),
        (np.zeros((1, 1, 3, 3)), np.zeros((1, 1, 3, 3)), "no batch or channel axis"),
    ],
)
def test_bad_masks_are_refused(pred, target, message):
    with pytest.raises(ValueError, match=message):
        diu(pred, target)


def test_bad_options_are_refused():
    a, b = np.zeros((2, 2)), np.ones((2, 2))
    with pytest.raises(ValueError, match="connectivity of a 2D image must be one of 'fg8', 'fg4', got 'fg26'"):
        diu(a, b, connectivity="fg26")
    with pytest.raises(ValueError, match="border must be one of 'background', 'open', got 'sphere'"):
        diu(a, b, border="sphere")


def test_3d_without_gudhi_names_the_install_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gudhi", None)
    with pytest.raises(ImportError, match=r"pip install 'topograph-loss\[gudhi\]'"):
        diu(np.zeros((2, 2, 2)), np.ones((2, 2, 2)))
