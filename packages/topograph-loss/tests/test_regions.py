import numpy as np
import pytest

from topograph_loss import critical_regions
from topograph_loss.complex import critical_sites


def image(*rows):
    return np.array([[char == "#" for char in row] for row in rows])


RING = image(".....", ".###.", ".#.#.", ".###.", ".....")
BLOCK = image(".....", ".###.", ".###.", ".###.", ".....")
BROKEN = image(".....", ".#.#.", ".#.#.", ".###.", ".....")
EMPTY = np.zeros((5, 5), bool)


@pytest.mark.parametrize(
    ("kind", "error", "pred", "target"),
    [
        ("split", "FN", image("###.###"), image("#######")),
        ("merge", "FP", image("#######"), image("###.###")),
        ("missing", "FN", EMPTY, BLOCK),
        ("spurious", "FP", BLOCK, EMPTY),
        ("hole filled", "FP", BLOCK, RING),
        ("hole filled", "FN", BROKEN, RING),
        ("hole opened", "FN", RING, BLOCK),
        ("hole opened", "FP", RING, BROKEN),
    ],
)
def test_each_kind_of_error_has_its_name(kind, error, pred, target):
    found = critical_regions(pred, target)
    assert [(region.kind, region.error) for region in found.regions] == [(kind, error)]
    assert found.count() == {kind: 1}


def test_a_region_knows_its_place_size_and_neighbours():
    found = critical_regions(image("###..###"), image("########"))
    (region,) = found.regions
    assert region.number == 1
    assert region.size == 2
    assert region.centre == (0.0, 3.5)
    assert (region.tp_neighbours, region.tn_neighbours) == (2, 1)
    assert found.labels.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]


def test_harmless_errors_are_not_listed():
    found = critical_regions(np.ones((4, 4)), np.pad(np.ones((2, 2)), 1))
    assert len(found) == 0
    assert not found.labels.any()


def test_a_cut_ring_in_3d_is_tangled():
    target = np.zeros((5, 7, 7), bool)
    target[2, 1:6, 1:6] = True
    target[2, 2:5, 2:5] = False
    pred = target.copy()
    pred[2, 1, 3] = False
    assert critical_regions(pred, target).count() == {"tangled": 1}
    assert len(critical_regions(pred, target, rule="neighbours")) == 0


def test_regions_are_those_of_the_loss(vessels):
    for P, G in zip(*vessels, strict=True):
        found, sites = critical_regions(P, G), critical_sites(P, G)
        assert len(found) == sites.count > 5
        assert np.array_equal(found.labels.ravel()[sites.site], sites.region + 1)
        assert np.count_nonzero(found.labels) == sites.site.size == sum(region.size for region in found.regions)
