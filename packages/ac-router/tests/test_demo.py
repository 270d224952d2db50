"""The demo's parts: what it shows, and that a longer run of its language model trains about as well as the plain one."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from ac_router.demo import gaussian_mixture, real_data, routing_accuracy, train_language_model


def test_tight_features_route_a_mixture_better():
    hidden, labels = gaussian_mixture(8.0, seed=1)
    result = routing_accuracy(hidden, labels, seed=1, wrong=0.1)
    assert result["feature"] > result["plain"] + 0.1


def test_equal_tightness_gives_no_gain():
    hidden, labels = gaussian_mixture(1.0, seed=1)
    result = routing_accuracy(hidden, labels, seed=1)
    assert abs(result["feature"] - result["plain"]) < 0.03


def test_real_data_are_standardised():
    for hidden, _ in real_data().values():
        torch.testing.assert_close(hidden.mean(0), torch.zeros(hidden.shape[1]), atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden.std(0, unbiased=False), torch.ones(hidden.shape[1]), atol=1e-4, rtol=0)


def test_a_language_model_trains_with_and_without():
    for adaptive in (False, True):
        result = train_language_model(adaptive=adaptive, seed=0, steps=3)
        assert 0 < result["clean"] < 100  # Untrained: the embedding is of unit variance and tied to the output.
        assert 0 < result["balance"] <= 1


@pytest.mark.slow
def test_a_longer_language_model_run_ends_close_to_the_plain_one():
    rows = []
    for seed in range(3):
        plain, ours = (train_language_model(adaptive=kind, seed=seed, steps=600) for kind in (False, True))
        rows.append([ours[name] - plain[name] for name in ("clean", "corrupted", "balance")])
        print(seed, plain, ours, flush=True)
    clean, corrupted, balance = np.mean(rows, axis=0)
    print(f"AC minus plain: clean {clean:+.4f}, corrupted {corrupted:+.4f}, balance {balance:+.4f}")
    # Two seeds of 200 steps ended 0.01 and 0.05 above the plain model: this would catch a router that collapses, no more.
    assert clean < 0.1
    assert corrupted < 0.1
    assert balance > -0.1
