"""A byte-level language model small enough to sweep on a CPU, in three parametrizations: SP, muP and u-muP.

One architecture (pre-norm, RoPE, SwiGLU, RMS norm without gain), three ways to draw, scale and step it:
"sp": weights N(0, 1/fan_in), one learning rate, logits q.k / sqrt(d). "mup": SP's draw at `MUP_BASE_WIDTH`, hidden
learning rates and the readout scaled by base / width, logits q.k / d (times the base's sqrt(d)), zero readout. "umup": this
package. The text is bytes of files on this machine, so nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import umup.functional as U
import umup.nn as unn
from chapbook_shared.validate import check_choice
from umup.optim import get_param_groups
from umup.precision import fp8

__all__ = ["ALPHAS", "SCHEMES", "PlainDecoder", "build", "optimizer_for", "text_bytes", "train"]

SCHEMES = ("sp", "mup", "umup")
ALPHAS = ("alpha_attn_softmax", "alpha_ffn_act", "alpha_res", "alpha_res_attn_ratio", "alpha_loss_softmax")
MUP_BASE_WIDTH = 32
VOCAB = 128


class _PlainLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int, attention_mult: float) -> None:
        super().__init__()
        self.heads, self.attention_mult = heads, attention_mult
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5, elementwise_affine=False)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5, elementwise_affine=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length hidden"]:
        batch, length, hidden = x.shape
        d = hidden // self.heads
        h = self.input_layernorm(x)
        q, k, v = (
            p(h).view(batch, length, self.heads, d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = torch.arange(length, device=x.device)
        q, k = U.rope(q, positions), U.rope(k, positions)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.attention_mult)
        x = x + self.o_proj(out.transpose(1, 2).reshape(batch, length, hidden))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class PlainDecoder(nn.Module):
    """The same transformer in plain torch: the baseline of the demo and of the benchmarks. `scheme`: "sp" or "mup"."""

    def __init__(
        self, vocab_size: int, hidden_size: int, layers: int, heads: int, intermediate_size: int, scheme: str = "sp"
    ) -> None:
        super().__init__()
        d = hidden_size // heads
        width_ratio = hidden_size / MUP_BASE_WIDTH
        self.readout_mult = 1 / width_ratio if scheme == "mup" else 1.0
        # The head dimension is that of the base model here, so muP's 1/d equals SP's 1/sqrt(d) up to a constant.
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(_PlainLayer(hidden_size, heads, intermediate_size, d**-0.5) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5, elementwise_affine=False)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if scheme == "mup":
            nn.init.zeros_(self.lm_head.weight)

    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.lm_head(x if self.readout_mult == 1 else x * self.readout_mult)

    def loss(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Mean next-token cross-entropy, in nats."""
        return F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(
    scheme: str, width: int, *, depth: int = 2, head_dim: int = 16, seq_len: int = 64, **alphas: Any
) -> nn.Module:
    """A fresh model over 7-bit bytes; `alphas` are u-muP's multipliers."""
    check_choice("scheme", scheme, SCHEMES)
    if width % head_dim:
        raise ValueError(f"width must be a multiple of head_dim {head_dim}, got {width}")
    if alphas and scheme != "umup":
        raise ValueError(f"{sorted(alphas)} are multipliers of u-muP: scheme must be 'umup', got {scheme!r}")
    unknown = sorted(set(alphas) - set(ALPHAS))
    if unknown:
        raise ValueError(f"unknown multipliers {unknown}: u-muP has {list(ALPHAS)}")
    if scheme != "umup":
        return PlainDecoder(VOCAB, width, depth, width // head_dim, 2 * width, scheme)
    return unn.TransformerDecoder(
        VOCAB, width, depth, width // head_dim, intermediate_size=2 * width, scale_seq_len=seq_len, **alphas
    )


def optimizer_for(
    model: nn.Module, scheme: str, lr: float, weight_decay: float = 0.0, **kwargs: Any
) -> torch.optim.AdamW:
    """AdamW with the scheme's learning rates. Fused: one kernel a group."""
    if scheme == "umup":
        groups: Any = get_param_groups(model, lr, weight_decay)
    elif scheme == "mup":
        hidden = [p for n, p in model.named_parameters() if "layers." in n]
        other = [p for n, p in model.named_parameters() if "layers." not in n]
        width = hidden[0].shape[1]
        groups = [{"params": hidden, "lr": lr * MUP_BASE_WIDTH / width}, {"params": other, "lr": lr}]
    else:
        groups = list(model.parameters())
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, fused=True, **kwargs)


@lru_cache(maxsize=4)
def text_bytes(source: str | None = None, *, limit: int = 2_000_000) -> Int[Tensor, "n"]:
    """7-bit bytes of a file, or of all text files under a folder in name order; by default torch's own Python sources."""
    root = Path(source) if source is not None else Path(nn.__file__).parent
    if not root.exists():
        raise FileNotFoundError(f"no text at {root}")
    endings = {".py", ".txt", ".md", ".rst"}
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in endings and p.is_file())
    data = bytearray()
    for file in files:
        data += file.read_bytes()
        if len(data) >= limit:
            break
    data = data[:limit]
    if len(data) < 1000:
        raise ValueError(f"{root} holds {len(data)} bytes of text; at least 1000 are needed")
    return torch.frombuffer(data, dtype=torch.uint8).long().clamp(max=VOCAB - 1)


def batches(data: Int[Tensor, "n"], steps: int, batch: int, seq_len: int, seed: int) -> Int[Tensor, "steps batch len"]:
    """`steps` batches of windows drawn from `seed`, independent of the model."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - seq_len, (steps, batch), generator=generator)
    return data[starts.unsqueeze(-1) + torch.arange(seq_len)]


def train(
    scheme: str = "umup",
    width: int = 32,
    lr: float = 1.0,
    *,
    steps: int = 150,
    depth: int = 2,
    batch: int = 8,
    seq_len: int = 64,
    seed: int = 0,
    weight_decay: float = 0.0,
    source: str | None = None,
    fp8_options: dict[str, Any] | None = None,
    tail: int = 15,
    **alphas: Any,
) -> float:
    """Train once with AdamW(0.9, 0.99), linear warmup and cosine; returns the mean loss of the last `tail` steps, in nats.

    A run whose loss stops being finite returns inf. `fp8_options`: train in FP8 with these options of `umup.fp8`.
    """
    data = batches(text_bytes(source), steps, batch, seq_len, seed)
    torch.manual_seed(seed)
    model = build(scheme, width, depth=depth, seq_len=seq_len, **alphas)
    optimizer = optimizer_for(model, scheme, lr, weight_decay, betas=(0.9, 0.99))
    warmup = max(steps // 8, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(
            (s + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * max(s - warmup, 0) / max(steps - warmup, 1)))
        ),
    )
    if fp8_options is None:
        losses = _loop(model, optimizer, schedule, data)
    else:
        with fp8(model, **fp8_options):
            losses = _loop(model, optimizer, schedule, data)
    last = losses[-tail:]
    return sum(last) / len(last) if len(losses) == steps else math.inf


def _loop(model: nn.Module, optimizer: Any, schedule: Any, data: Tensor) -> Sequence[float]:
    losses: list[float] = []
    for ids in data:
        optimizer.zero_grad()
        loss = model.loss(ids)  # type: ignore[operator]
        value = loss.item()
        if not math.isfinite(value):
            break
        losses.append(value)
        loss.backward()
        optimizer.step()
        schedule.step()
    return losses
