"""Unlearning losses on logits and labels: no model, no trainer.

Yuan et al., "A Closer Look at Machine Unlearning for Large Language Models" (ICLR 2025), sections 3 and 4.

Symbols   paper            here
          z                logits[b, t, v], the scores of token t + 1
          K                vocabulary size
          y                labels[b, t], token ids; -100 where a token is not supervised. *Not* shifted: position t predicts label t + 1
          -log p(y | x)    nll[b], a sum over the supervised tokens (`sequence_nll`), positive
          theta_0          ref_*: the frozen model from the start of the request
          U                the uniform distribution over the vocabulary

Signs: everything here takes negative log-likelihoods, so `nll - ref_nll` is minus the log-ratio of the papers.
All softmax arithmetic is in float32 (float64 for float64 logits), whatever the dtype of the logits. Where a mean runs over nothing
(no supervised token) it is 0, with a gradient of 0, never NaN.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

IGNORE = -100
"""The label of a token that is not supervised."""

Direction = Literal["uniform_to_model", "model_to_uniform"]
Reduction = Literal["mean", "sum", "none"]

# The rows of one chunk fit in a core's cache on a CPU, and are enough to fill an accelerator.
_CHUNK_BYTES = {"cpu": 4 << 20}
_CHUNK_BYTES_ACCELERATOR = 1 << 28


def sequence_nll(
    logits: Float[Tensor, "batch time vocab"], labels: Int[Tensor, "batch time"], *, chunk: int | None = None
) -> Float[Tensor, " batch"]:
    """-log p(y | x) of each sequence in nats, *summed* over its supervised tokens: what NPO, DPO and AP take."""
    return _token_nll(logits, labels, chunk).sum(1)


def token_mean_nll(
    logits: Float[Tensor, "batch time vocab"], labels: Int[Tensor, "batch time"], *, chunk: int | None = None
) -> Float[Tensor, ""]:
    """The causal LM loss: mean over all supervised tokens of the batch (not a mean of the sequences' means), in nats."""
    return _token_nll(logits, labels, chunk).sum() / answer_positions(labels).sum().clamp(min=1)


def ga(logits: Float[Tensor, "batch time vocab"], labels: Int[Tensor, "batch time"]) -> Float[Tensor, ""]:
    """Gradient ascent on the forget set: minus the LM loss (eq. 2). Unbounded below."""
    return -token_mean_nll(logits, labels)


def idk(logits: Float[Tensor, "batch time vocab"], refusal_labels: Int[Tensor, "batch time"]) -> Float[Tensor, ""]:
    """The LM loss on forget questions answered with a refusal (eq. 5)."""
    return token_mean_nll(logits, refusal_labels)


def gd(logits: Float[Tensor, "batch time vocab"], labels: Int[Tensor, "batch time"]) -> Float[Tensor, ""]:
    """Gradient descent on the retain set: the LM loss (eq. 6)."""
    return token_mean_nll(logits, labels)


def npo(
    nll: Float[Tensor, " batch"], ref_nll: Float[Tensor, " batch"], *, beta: float = 0.1, reduction: Reduction = "mean"
) -> Float[Tensor, " *reduced"]:
    """Negative preference optimisation, (2/beta) softplus(beta log(p/p_0)) (eq. 3)."""
    _check_beta(beta)
    _check_sequences(nll=nll, ref_nll=ref_nll)
    return _reduce(softplus(-beta * (nll - ref_nll)) * (2 / beta), reduction)


def dpo(
    nll_answer: Float[Tensor, " batch"],
    nll_refusal: Float[Tensor, " batch"],
    ref_nll_answer: Float[Tensor, " batch"],
    ref_nll_refusal: Float[Tensor, " batch"],
    *,
    beta: float = 0.1,
    reduction: Reduction = "mean",
) -> Float[Tensor, " *reduced"]:
    """DPO on forget questions: the refusal is preferred to the answer. Carries the factor 2/beta of NPO (eq. 4)."""
    _check_beta(beta)
    _check_sequences(
        nll_answer=nll_answer, nll_refusal=nll_refusal, ref_nll_answer=ref_nll_answer, ref_nll_refusal=ref_nll_refusal
    )
    margin = (nll_answer - nll_refusal) - (ref_nll_answer - ref_nll_refusal)
    return _reduce(softplus(-beta * margin) * (2 / beta), reduction)


def ap(
    nll_answer: Float[Tensor, " batch"],
    nll_refusal: Float[Tensor, " batch"],
    *,
    beta: float = 0.1,
    reduction: Reduction = "mean",
) -> Float[Tensor, " *reduced"]:
    """Answer preservation on retain questions: the answer stays above the refusal (eq. 10). No reference model.

    The gradient is w (grad nll_answer - grad nll_refusal) with w = 1 / (1 + (p(y) / p(y_idk))^beta): it fades as the answer wins (eq. 11).
    """
    _check_beta(beta)
    _check_sequences(nll_answer=nll_answer, nll_refusal=nll_refusal)
    return _reduce(softplus(-beta * (nll_refusal - nll_answer)) / beta, reduction)


def simnpo(
    nll: Float[Tensor, " batch"],
    lengths: Int[Tensor, " batch"],
    *,
    beta: float = 2.5,
    gamma: float = 0.0,
    reduction: Reduction = "mean",
) -> Float[Tensor, " *reduced"]:
    """SimNPO (Fan et al. 2024, eq. 4): NPO on length-normalised likelihoods, without a reference model. `lengths` in tokens."""
    _check_beta(beta)
    _check_sequences(nll=nll, lengths=lengths)
    return _reduce(softplus(gamma - beta * nll / lengths.clamp(min=1)) * (2 / beta), reduction)


def wga(
    logits: Float[Tensor, "batch time vocab"], labels: Int[Tensor, "batch time"], *, alpha: float = 1.0
) -> Float[Tensor, ""]:
    """Weighted gradient ascent (Wang et al. 2025): each token's ascent is weighted by its own p^alpha, held constant."""
    nll = _token_nll(logits, labels, None)
    return wga_sum(nll, alpha=alpha) / answer_positions(labels).sum().clamp(min=1)


def wga_sum(token_nll: Float[Tensor, " *shape"], *, alpha: float = 1.0) -> Float[Tensor, ""]:
    """The numerator of `wga`, from the tokens' NLL (0 where a token is not supervised)."""
    return -((-alpha * token_nll).exp().detach() * token_nll).sum()


def me(
    logits: Float[Tensor, "batch time vocab"],
    positions: Int[Tensor, "batch time"] | Bool[Tensor, "batch time"],
    *,
    direction: Direction = "uniform_to_model",
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Float[Tensor, " *reduced"]:
    """Maximising entropy: the divergence between each next-token distribution P_t and the uniform U (eq. 8), in nats.

    `positions`: labels (integers; positions that predict a supervised token count) or a mask (booleans) of the positions t whose P_t counts.
    `direction`: "uniform_to_model" is KL(U || P) = logsumexp(z) - mean(z) - log K, what the official code computes and all published
    numbers rest on; "model_to_uniform" is KL(P || U) = log K - H(P), the formula in the paper.
    `reduction="none"` gives (batch, time) with 0 at positions that do not count. `chunk` rows are worked on at a time.
    """
    mask = _mask(positions, logits)
    rows = uniform_divergence_rows(logits[mask], direction=direction, chunk=chunk)
    return _reduce_positions(rows, mask, reduction)


def kl(
    logits: Float[Tensor, "batch time vocab"],
    ref_logits: Float[Tensor, "batch time vocab"],
    positions: Int[Tensor, "batch time"] | Bool[Tensor, "batch time"],
    *,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Float[Tensor, " *reduced"]:
    """KL(P0_t || P_t) between the reference and the model on the retain set (eq. 7), in nats. No gradient reaches `ref_logits`.

    `positions` as in `me`. The official code counts every position of the padded batch: `torch.ones_like(input_ids, dtype=torch.bool)`.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(f"logits have shape {tuple(logits.shape)} but ref_logits {tuple(ref_logits.shape)}")
    mask = _mask(positions, logits)
    rows = kl_rows(logits[mask], ref_logits[mask], chunk=chunk)
    return _reduce_positions(rows, mask, reduction)


def rmu_forget(
    hidden: Float[Tensor, "rows width"], control: Float[Tensor, " width"], *, reduction: Reduction = "mean"
) -> Float[Tensor, " *reduced"]:
    """RMU (Li et al. 2024, eq. 1): squared distance of forget activations from a random vector, mean over the width."""
    return _reduce((hidden - control).square().mean(-1), reduction)


def rmu_retain(
    hidden: Float[Tensor, "rows width"], ref_hidden: Float[Tensor, "rows width"], *, reduction: Reduction = "mean"
) -> Float[Tensor, " *reduced"]:
    """RMU (Li et al. 2024, eq. 2): squared distance of retain activations from the reference's, mean over the width."""
    return _reduce((hidden - ref_hidden.detach()).square().mean(-1), reduction)


def answer_positions(labels: Int[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """The positions that predict a supervised token. The last one predicts nothing and never counts."""
    return torch.nn.functional.pad(labels[:, 1:] != IGNORE, (0, 1), value=False)


def token_positions(attention_mask: Int[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """The positions that predict a real (not padding) token: "nonpad" of ME."""
    return torch.nn.functional.pad(attention_mask[:, 1:] != 0, (0, 1), value=False)


def nll_rows(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], *, chunk: int | None = None
) -> Float[Tensor, " rows"]:
    """-log softmax(z)[target] of each row, in nats. Its only temporary of the logits' size is their gradient."""
    _check_rows(logits, targets)
    return _Nll.apply(logits, targets, _chunk_rows(logits, chunk))


def uniform_divergence_rows(
    logits: Float[Tensor, "rows vocab"], *, direction: Direction = "uniform_to_model", chunk: int | None = None
) -> Float[Tensor, " rows"]:
    """KL(U || P) or KL(P || U) of each row, in nats. Its only temporary of the logits' size is their gradient."""
    if direction not in ("uniform_to_model", "model_to_uniform"):
        raise ValueError(f"direction must be 'uniform_to_model' or 'model_to_uniform', got {direction!r}")
    return _UniformDivergence.apply(logits, direction == "uniform_to_model", _chunk_rows(logits, chunk))


def kl_rows(
    logits: Float[Tensor, "rows vocab"], ref_logits: Float[Tensor, "rows vocab"], *, chunk: int | None = None
) -> Float[Tensor, " rows"]:
    """KL(softmax(ref_logits) || softmax(logits)) of each row, in nats."""
    return _Kl.apply(logits, ref_logits.detach(), _chunk_rows(logits, chunk))


class _Nll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunk: int) -> Tensor:
        nll, lse = _empty_rows(logits), _empty_rows(logits)
        for rows in _chunks(logits, chunk):
            z = _wide(logits[rows])
            lse[rows] = _logsumexp(z)
            nll[rows] = lse[rows] - z.gather(1, targets[rows, None]).squeeze(1)
        ctx.save_for_backward(logits, targets)
        ctx.chunk = chunk
        return nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk):
            weight = grad[rows, None]
            into = _scratch(out, rows)
            torch.softmax(_wide(logits[rows]), 1, out=into).mul_(weight)
            into.scatter_add_(1, targets[rows, None], -weight)
            _store(out, rows, into)
        return out, None, None


class _UniformDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, uniform_to_model: bool, chunk: int) -> Tensor:
        log_k = math.log(logits.shape[1])
        divergence, lse = _empty_rows(logits), _empty_rows(logits)
        for rows in _chunks(logits, chunk):
            z = _wide(logits[rows])
            lse[rows] = _logsumexp(z)
            if uniform_to_model:
                divergence[rows] = lse[rows] - z.mean(1) - log_k
            else:
                log_p = _finite(z - lse[rows, None])
                divergence[rows] = (log_p.exp() * log_p).sum(1) + log_k
        ctx.save_for_backward(logits, lse, divergence)
        ctx.uniform_to_model, ctx.chunk = uniform_to_model, chunk
        return divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, divergence = ctx.saved_tensors
        k = logits.shape[1]
        out = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk):
            weight = grad[rows, None]
            into = _scratch(out, rows)
            if ctx.uniform_to_model:  # d/dz_v = p_v - 1/K
                torch.softmax(_wide(logits[rows]), 1, out=into).sub_(1 / k).mul_(weight)
            else:  # d/dz_v = p_v (log p_v + H), and H = log K - divergence
                torch.sub(_wide(logits[rows]), lse[rows, None], out=into)
                log_p = _finite(into.clone())
                into.exp_().mul_(log_p.add_(math.log(k) - divergence[rows, None])).mul_(weight)
            _store(out, rows, into)
        return out, None, None


class _Kl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, chunk: int) -> Tensor:
        divergence, lse, ref_lse = _empty_rows(logits), _empty_rows(logits), _empty_rows(logits)
        for rows in _chunks(logits, chunk):
            z, ref_z = _wide(logits[rows]), _wide(ref_logits[rows]).to(lse.dtype)
            lse[rows], ref_lse[rows] = _logsumexp(z), ref_z.logsumexp(1)
            log_p, ref_log_p = z - lse[rows, None], ref_z - ref_lse[rows, None]
            ref_p = ref_log_p.exp()
            divergence[rows] = torch.where(ref_p > 0, ref_p * (ref_log_p - log_p), 0).sum(1)
        ctx.save_for_backward(logits, ref_logits, lse, ref_lse)
        ctx.chunk = chunk
        return divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, ref_logits, lse, ref_lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk):
            into = _scratch(out, rows)
            torch.sub(_wide(logits[rows]), lse[rows, None], out=into).exp_()
            into.sub_((_wide(ref_logits[rows]).to(lse.dtype) - ref_lse[rows, None]).exp_()).mul_(grad[rows, None])
            _store(out, rows, into)
        return out, None, None


def _token_nll(logits: Tensor, labels: Tensor, chunk: int | None) -> Tensor:
    """(batch, time) NLL of each supervised token at the position that predicts it, 0 elsewhere."""
    mask = answer_positions(_same_grid(labels, logits, "labels"))
    targets = torch.roll(labels, -1, dims=1)[mask]
    vocab = logits.shape[-1]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise ValueError(
            f"labels must be token ids below the vocabulary's {vocab}, or {IGNORE}, got {int(targets.min())} to {int(targets.max())}"
        )
    rows = nll_rows(logits[mask], targets, chunk=chunk)
    return _scatter(rows, mask)


def _mask(positions: Tensor, logits: Tensor) -> Tensor:
    _same_grid(positions, logits, "positions")
    if positions.is_floating_point():
        raise TypeError(f"positions must be labels (integers) or a mask (booleans), got {positions.dtype}")
    return positions if positions.dtype == torch.bool else answer_positions(positions)


def _same_grid(tensor: Tensor, logits: Tensor, name: str) -> Tensor:
    if logits.ndim != 3 or tensor.shape != logits.shape[:2]:
        raise ValueError(
            f"logits must be (batch, time, vocab) and {name} (batch, time), got {tuple(logits.shape)} and {tuple(tensor.shape)}"
        )
    return tensor


def _scatter(rows: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=rows.dtype, device=rows.device).masked_scatter(mask, rows)


def _reduce_positions(rows: Tensor, mask: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return _scatter(rows, mask)
    return _reduce(rows, reduction)


def _reduce(values: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "mean":
        return values.sum() / max(values.numel(), 1)
    if reduction == "sum":
        return values.sum()
    if reduction == "none":
        return values
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _check_beta(beta: float) -> None:
    if not (beta > 0 and math.isfinite(beta)):
        raise ValueError(f"beta must be positive and finite, got {beta!r}")


def _check_sequences(**values: Tensor) -> None:
    """One number a sequence each: shapes that would broadcast are a mistake."""
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"all must have one entry a sequence and the same shape (batch,), got {listed}")


def _check_rows(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be (rows, vocab) and targets (rows,), got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )


def _wide(z: Tensor) -> Tensor:
    return z if z.dtype in (torch.float32, torch.float64) else z.float()


def _logsumexp(z: Tensor) -> Tensor:
    """logsumexp of each row, by way of softmax: torch fuses that one, and the largest p is 1 / sum exp(z - max z)."""
    return z.amax(1) - torch.softmax(z, 1).amax(1).log()


def _finite(log_p: Tensor) -> Tensor:
    """A log-probability of -inf becomes the lowest number: its product with p = 0 is then 0 and not NaN."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


def _empty_rows(logits: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty(logits.shape[0], dtype=dtype, device=logits.device)


def _scratch(out: Tensor, rows: slice) -> Tensor:
    """Where a chunk of the gradient is computed: in place, unless the logits are of a narrow dtype."""
    part = out[rows]
    return part if part.dtype in (torch.float32, torch.float64) else torch.empty_like(part, dtype=torch.float32)


def _store(out: Tensor, rows: slice, chunk: Tensor) -> None:
    if chunk.dtype != out.dtype:
        out[rows] = chunk


def _chunk_rows(logits: Tensor, chunk: int | None) -> int:
    if chunk is not None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 row, got {chunk!r}")
        return chunk
    size = _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ACCELERATOR)
    return max(1, size // (4 * max(logits.shape[-1], 1)))


def _chunks(logits: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, logits.shape[0], chunk)]
