import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib import colors, pyplot

from topograph_loss.viz import COLOURS, show_critical_regions


def test_a_critical_pixel_has_the_colour_of_its_kind_and_a_ring():
    target = np.zeros((5, 9))
    target[2] = 1
    pred = target.copy()
    pred[2, 4] = 0
    pred[1, 1] = 1  # harmless
    ax = show_critical_regions(pred, target)
    picture = ax.images[0].get_array()
    for pixel, name in (((2, 4), "split"), ((1, 1), "harmless"), ((2, 0), "right")):
        assert np.allclose(picture[pixel], colors.to_rgb(COLOURS[name]))
    assert len(ax.patches) == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["right", "harmless", "split (1)"]
    pyplot.close(ax.figure)


def test_volumes_are_refused():
    with pytest.raises(ValueError, match="only 2D masks"):
        show_critical_regions(np.zeros((2, 2, 2)), np.zeros((2, 2, 2)))
