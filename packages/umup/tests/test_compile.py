"""torch.compile, in a process of its own: the shape checks that tests run under are not for the compiler."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import torch
    import umup.nn as unn
    from umup.optim import get_param_groups

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = unn.TransformerDecoder(13, 16, 2, 4, kv_heads=2, scale_seq_len=8)
    eager = unn.TransformerDecoder(13, 16, 2, 4, kv_heads=2, scale_seq_len=8)
    eager.load_state_dict(model.state_dict())

    count = 0
    def backend(graph, inputs):
        global count
        count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model.loss, fullgraph=True, dynamic=None, backend=backend)
    for batch in (2, 3, 4, 5, 6):
        ids = torch.randint(13, (batch, 8))
        model.zero_grad()
        eager.zero_grad()
        loss = compiled(ids)
        loss.backward()
        wanted = eager.loss(ids)
        wanted.backward()
        torch.testing.assert_close(loss, wanted)
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    # One graph for the first batch size and one, dynamic, for all others: what a plain model takes.
    assert count <= 2, count
    whole = torch.compile(model)
    assert len(get_param_groups(whole, 1.0)) == len(get_param_groups(model, 1.0))
    print("same")
"""


def test_the_whole_loss_compiles_to_one_graph_and_follows_the_batch_size():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same" in done.stdout


INDUCTOR = """
    import torch
    import umup.nn as unn
    from umup.hf import UmupConfig, UmupForCausalLM
    from umup.optim import AdamW

    torch.set_num_threads(1)

    def losses(model, loss, ids):
        optimizer = AdamW(model, lr=0.5, weight_decay=2**-13, fused=True)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            value = loss(ids)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    def decoder():
        torch.manual_seed(0)
        model = unn.TransformerDecoder(13, 16, 2, 4, kv_heads=2, scale_seq_len=8)
        return model, model.loss

    def hf():
        torch.manual_seed(0)
        model = UmupForCausalLM(UmupConfig(vocab_size=13, hidden_size=16, head_dim=4, num_hidden_layers=2, scale_seq_len=8))
        return model, lambda ids: model(ids, labels=ids).loss

    ids = torch.randint(13, (3, 8))
    for make in (decoder, hf):
        model, loss = make()
        wanted = losses(model, loss, ids)
        model, loss = make()
        got = losses(model, torch.compile(loss, fullgraph=True), ids)
        assert wanted[-1] < wanted[0]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-3, atol=1e-3)
    print("same")
"""


@pytest.mark.slow
def test_training_under_inductor_equals_eager_training():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INDUCTOR)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same" in done.stdout
