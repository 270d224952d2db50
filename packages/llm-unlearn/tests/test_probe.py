import pytest
import torch

from llm_unlearn import quantization_probe, relearn_probe
from llm_unlearn.probe import quantize_weights
from llm_unlearn.scoring import score_answers


def test_relearning_raises_the_probability_and_leaves_the_model_alone(model, tokenizer, forget):
    before = {name: p.clone() for name, p in model.state_dict().items()}

    def evaluate(m):
        return {"loss": sum(s.mean for s in score_answers(m, forget, tokenizer))}

    curve = relearn_probe(model, tokenizer, forget[:3], evaluate, steps=(0, 4, 12), learning_rate=5e-3)
    assert list(curve) == [0, 4, 12]
    assert curve[0]["loss"] > curve[4]["loss"] > curve[12]["loss"]
    assert curve[0] == evaluate(model)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_quantisation_loses_more_with_fewer_bits(model):
    weight = model.model.layers[0].mlp.up_proj.weight

    def distance(m):
        return {"distance": (m.model.layers[0].mlp.up_proj.weight - weight).abs().max().item()}

    results = quantization_probe(model, distance, bits=(8, 4), group_size=8)
    assert results["full"]["distance"] == 0
    assert 0 < results["int8"]["distance"] < results["int4"]["distance"]


def test_a_quantised_group_has_few_levels_and_keeps_its_largest_weight():
    layer = torch.nn.Linear(6, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[7.0, 3.4, -1.6, 0.2, 0.0, 0.0]]))
    quantize_weights(layer, bits=4, group_size=4)
    torch.testing.assert_close(layer.weight, torch.tensor([[7.0, 3.0, -2.0, 0.0, 0.0, 0.0]]))


def test_wrong_arguments(model, tokenizer, forget):
    with pytest.raises(ValueError, match="items is empty"):
        relearn_probe(model, tokenizer, [], lambda m: {})
    with pytest.raises(ValueError, match="steps must be increasing"):
        relearn_probe(model, tokenizer, forget, lambda m: {}, steps=(3, 1))
    with pytest.raises(ValueError, match="bits must be one of"):
        quantization_probe(model, lambda m: {}, bits=(1,))
