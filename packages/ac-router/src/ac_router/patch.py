"""`patch_model`: Adaptive Clustering in a transformers mixture-of-experts model (Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, or one like them).

Nothing is replaced. The routers keep their class, weights and forward; hooks around them scale what goes in and note what comes out.
So `output_router_logits`, the auxiliary loss, adapters and quantisation on the gate, and `save_pretrained` go on as before.

How a router learns what the previous layer chose: the model's forward makes a `RoutingState` and passes it down as a keyword
argument, which these models hand through each decoder layer to its attention; there a hook takes it out and holds it ready for the router
of the same layer. The state thus travels with the arguments that gradient checkpointing keeps for recomputation, in whatever
thread that happens, and belongs to one forward pass only. (Without gradient it is simply held ready for all layers until the end.)
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ac_router.adaptive import AdaptiveWeights, RoutingState, Stats, WeightOptions
from ac_router.clusters import flatten_assignment, scale_by_table, valid_labels
from ac_router.diagnostics import is_watching, observe
from chapbook_shared.validate import check_choice, check_int, import_extra

STATE = "ac_routing_state"

# The state of the pass that this thread is in, between a decoder layer's attention and its router.
_current: ContextVar[RoutingState | None] = ContextVar("ac_router_state", default=None)


@dataclass(frozen=True)
class RouterFamily:
    """Where a router's output tuple holds the logits, the gate weights and the expert indices."""

    logits: int = 0
    gates: int = 1
    indices: int = 2
    complete: bool = True  # No index is -1.


_families: dict[str, RouterFamily] = {
    "MixtralTopKRouter": RouterFamily(),
    "OlmoeTopKRouter": RouterFamily(),
    "Qwen2MoeTopKRouter": RouterFamily(),
    "Qwen3MoeTopKRouter": RouterFamily(),
}


def register_router(router: type[nn.Module] | str, *, logits: int = 0, gates: int = 1, indices: int = 2) -> None:
    """Let `patch_model` take routers of this class, or class name, and its subclasses.

    Such a router is called with the tokens as its first argument ([..., dim]) and returns a tuple with logits [tokens, experts], gate
    weights [tokens, k] and indices [tokens, k], best first, at the given places. It has a `weight` [experts, dim].
    """
    _families[router if isinstance(router, str) else router.__name__] = RouterFamily(
        logits, gates, indices, complete=False
    )


def patch_model(
    model: nn.Module,
    layers: Literal["auto"] | Sequence[int] = "auto",
    *,
    skip_first: int = 1,
    stats: Stats = "ema",
    mix_weights: bool = False,
    stat_source: Literal["current", "previous"] = "current",
    **weight_options: Unpack[WeightOptions],
) -> nn.Module:
    """Route by Adaptive Clustering in a transformers MoE model, in place; returns the model.

    `layers`: numbers of decoder layers, or `"auto"`: all mixture-of-experts layers but the first `skip_first` of them (the first has no
    previous assignment; the paper skips one or two). "Previous" is the previous mixture-of-experts layer, dense ones are passed over.
    `stats="ema"` by default: batch statistics in training, their running average in `eval()` and for generation, where there is no
    batch to speak of. A model that was not trained so routes plainly in `eval()` until it has an average: see `collect_statistics`.
    `mix_weights`, `stat_source`: see `ACRouter`; all else: see `AdaptiveWeights`.

    The running averages are buffers `...gate.ac_weights.ema_count` and `.ema_dispersion` (`persistent=False` keeps them out of the state
    dict); nothing else about the state dict changes. Padding is left out of the statistics by the 2-d `attention_mask`.

    Raises ValueError for a model without routers it knows (see `register_router`), or one already patched.
    """
    check_int("skip_first", skip_first, minimum=1)
    check_choice("stat_source", stat_source, ("current", "previous"))
    if stats == "causal" and (mix_weights or stat_source == "previous"):
        raise ValueError("stats='causal' takes neither mix_weights=True nor stat_source='previous': use stats='ema'")
    base, sites = _find(model)
    if hasattr(base, "ac_patch"):
        raise ValueError("the model is already patched: call unpatch_model(model) first")
    chosen = _choose(sites, layers, skip_first)

    made = {
        site.layer: AdaptiveWeights(
            site.dim, sites[at - 1].num_experts, device=site.device, stats=stats, **weight_options
        )
        for at, site in enumerate(sites)
        if site.layer in chosen
    }
    patch = _Patch()
    needed = {sites[at - 1].layer for at, site in enumerate(sites) if site.layer in chosen}
    holder = _Holder()
    decoder: Sequence[nn.Module] = list(base.layers)  # type: ignore[arg-type]
    safe = _takes_any_keyword(base) and all(
        _takes_any_keyword(block) and _takes_any_keyword(getattr(block, "self_attn", None)) for block in decoder
    )
    names = list(inspect.signature(base.forward).parameters)
    start = _StartOfPass(holder, names, passes_state=safe, causal=stats == "causal")
    patch.handles.append(base.register_forward_pre_hook(start, with_kwargs=True))
    patch.handles.append(base.register_forward_hook(_EndOfPass(holder), always_call=True))
    if safe:
        for at, block in enumerate(decoder):
            attention = block.self_attn
            assert isinstance(attention, nn.Module)
            # Only where a router takes it away again.
            hook = _AtAttention(holder, keep=at in chosen | needed)
            patch.handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
    for at, site in enumerate(sites):
        gate = site.gate
        if site.layer in chosen:
            gate.add_module("ac_weights", made[site.layer])
            made[site.layer].train(gate.training)
            patch.gates.append(gate)
            before = _BeforeRouter(
                holder,
                site.layer,
                sites[at - 1].layer,
                decoder[site.layer],
                complete=sites[at - 1].family.complete,
                mix=mix_weights,
                from_previous=stat_source == "previous",
                safe=safe,
            )
            patch.handles.append(gate.register_forward_pre_hook(before, with_kwargs=True))
        if site.layer in chosen | needed:
            after = _AfterRouter(
                holder,
                site.layer,
                site.family,
                previous=sites[at - 1].layer if site.layer in chosen else None,
                next_gate=sites[at + 1].gate if stat_source == "previous" and site.layer in needed else None,
                keep_gates=mix_weights,
                safe=safe,
            )
            patch.handles.append(gate.register_forward_hook(after, with_kwargs=True))
    base.ac_patch = patch  # type: ignore[assignment]
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Undo `patch_model`, running averages included; returns the model. A model that is not patched stays as it is."""
    for module in model.modules():
        patch = getattr(module, "ac_patch", None)
        if isinstance(patch, _Patch):
            for handle in patch.handles:
                handle.remove()
            for gate in patch.gates:
                del gate.ac_weights
            del module.ac_patch
    return model


def statistics_state(model: nn.Module) -> dict[str, Tensor]:
    """The running averages of a patched model (or of any module that holds `ACRouter`s), by their names in its state dict."""
    return {
        f"{name}.{buffer}" if name else buffer: getattr(module, buffer).clone()
        for name, module in model.named_modules()
        if isinstance(module, AdaptiveWeights)
        for buffer in ("ema_count", "ema_dispersion")
    }


def load_statistics(model: nn.Module, source: Mapping[str, Tensor] | str | Path) -> None:
    """Give a patched model the running averages of `source`: a state dict, a safetensors file, or a `save_pretrained` folder.

    `from_pretrained` builds the plain model and drops the averages in the checkpoint; call this after `patch_model`. Layers are matched by
    name, or else by number, since checkpoints may name modules otherwise than the model does. Raises KeyError if a patched layer is missing.
    """
    found: dict[str, list[Tensor]] = {}
    for key, value in _tensors(source):
        buffer = key.rpartition(".")[2]
        if buffer in ("ema_count", "ema_dispersion"):
            found[key] = [value]
            if (layer := _layer_of(key, buffer)) != key:
                found.setdefault(layer, []).append(value)
    for name, module in model.named_modules():
        if isinstance(module, AdaptiveWeights):
            averages = {}
            for buffer in ("ema_count", "ema_dispersion"):
                key = f"{name}.{buffer}" if name else buffer
                if not (values := found.get(key) or found.get(_layer_of(key, buffer))):
                    raise KeyError(f"the source has no {buffer} for {name}: it was not saved with this layer patched")
                if len(values) > 1:
                    raise KeyError(f"the source has no {key}, and more than one {buffer} for a layer of this number")
                averages[buffer] = values[0]
            module.load_state_dict(averages)


def _layer_of(key: str, buffer: str) -> str:
    number = re.search(r"layers\.(\d+)\.", key)
    return f"layer {number.group(1)} {buffer}" if number else key


def _tensors(source: Mapping[str, Tensor] | str | Path) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, Mapping):
        yield from source.items()
        return
    safetensors = import_extra("safetensors", "ac-router[hf]")
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no safetensors file at {path}")
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                if key.rpartition(".")[2].startswith("ema_"):
                    yield key, opened.get_tensor(key)


@dataclass
class _Patch:
    """What has to be undone."""

    handles: list[RemovableHandle] = field(default_factory=list)
    gates: list[nn.Module] = field(default_factory=list)


@dataclass(frozen=True)
class _Site:
    """One router in one decoder layer. `gate` is the router, or what an adapter library has put around it."""

    layer: int
    gate: nn.Module
    family: RouterFamily
    num_experts: int
    dim: int
    device: torch.device


def _find(model: nn.Module) -> tuple[nn.Module, list[_Site]]:
    """The module that runs the decoder layers, and the routers in them."""
    for base in model.modules():
        layers = getattr(base, "layers", None)
        if isinstance(layers, nn.ModuleList):
            sites = [site for at, block in enumerate(layers) for site in _sites(at, block)]
            if sites:
                return base, sites
    routers = sorted({type(m).__name__ for m in model.modules() if re.search("router|gate$", type(m).__name__, re.I)})
    raise ValueError(
        f"{type(model).__name__} has no decoder layers with a router of a known class ({', '.join(sorted(_families))})"
        + (f"; it has {', '.join(routers)}: see register_router" if routers else "")
    )


def _sites(layer: int, block: nn.Module) -> list[_Site]:
    for path, module in block.named_modules():
        family = next((_families[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _families), None)
        if family is None:
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        # Around the router as adapters leave it: gate.base_layer, gate.original_module, gate.modules_to_save.default.
        outer = re.sub(r"(\.base_layer|\.original_module|\.modules_to_save\.\w+)+$", "", path)
        gate = block.get_submodule(outer)
        while (
            type(gate).__name__ == "ParamWrapper"
        ):  # peft's, which calls the router inside, and goes when it is merged.
            inner = gate.base_layer
            assert isinstance(inner, nn.Module)
            gate = inner
        experts, dim = getattr(module, "num_experts", weight.shape[0]), getattr(module, "hidden_dim", weight.shape[-1])
        return [_Site(layer, gate, family, int(experts), int(dim), _device_of(module, weight))]
    return []


def _device_of(module: nn.Module, weight: Tensor) -> torch.device:
    """Where the router works: accelerate keeps an offloaded weight on the meta device and fetches it for each call."""
    works = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    device = weight.device if works is None else torch.device(works)
    return torch.device("cpu") if device.type == "meta" else device


def _choose(sites: list[_Site], layers: Literal["auto"] | Sequence[int], skip_first: int) -> set[int]:
    present = [site.layer for site in sites]
    if isinstance(layers, str):
        check_choice("layers", layers, ("auto",))
        chosen = present[skip_first:]
        if not chosen:
            raise ValueError(
                f"skip_first={skip_first} leaves none of the {len(present)} mixture-of-experts layers {present} to patch"
            )
        return set(chosen)
    chosen = list(layers)
    unknown = sorted(set(chosen) - set(present))
    if unknown or not chosen:
        raise ValueError(f"layers must be among the mixture-of-experts layers {present[1:]}, got {list(layers)}")
    if present[0] in chosen:
        raise ValueError(
            f"layer {present[0]} is the first mixture-of-experts layer and has no previous assignment: choose from {present[1:]}"
        )
    return set(chosen)


def _takes_any_keyword(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return False
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


class _Holder:
    """Holds the state between a layer's attention and its router.

    A context variable, one per thread; in compiled code, which cannot read those, an attribute that exists only while it is traced.
    """

    def __init__(self) -> None:
        self.traced: RoutingState | None = None

    def set(self, state: RoutingState | None) -> None:
        if torch.compiler.is_compiling():
            self.traced = state
        else:
            _current.set(state)

    def get(self) -> RoutingState | None:
        return self.traced if torch.compiler.is_compiling() else _current.get()


class _StartOfPass:
    """Before the model: a new state, with the padding mask, into the keyword arguments."""

    def __init__(self, holder: _Holder, names: list[str], *, passes_state: bool, causal: bool):
        self.holder, self.names, self.passes_state, self.causal = holder, names, passes_state, causal

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        state = RoutingState()
        if tokens is not None:
            state.shape = (tokens.shape[0], tokens.shape[1])
            mask = given.get("attention_mask")
            # With a cache the mask covers the past too; a prepared 4-d mask does not tell which tokens are padding.
            if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= tokens.shape[1]:
                state.mask = mask[:, mask.shape[1] - tokens.shape[1] :].reshape(-1) != 0
        if self.causal and _cached_tokens(given):
            raise ValueError(
                "stats='causal' needs every sequence whole, but a cache holds its earlier tokens: pass use_cache=False, or patch "
                "with stats='ema' for generation"
            )
        # Without gradient nothing is recomputed, and the shorter way will do.
        if self.passes_state and (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            return args, {**kwargs, STATE: state}
        self.holder.set(state)
        return args, kwargs


def _cached_tokens(given: Mapping[str, Any]) -> int:
    for name in ("cache", "past_key_values"):
        cache = given.get(name)
        if cache is not None and hasattr(cache, "get_seq_length"):
            return int(cache.get_seq_length())
    return 0


class _EndOfPass:
    """After the model, also when it failed: nothing is left behind."""

    def __init__(self, holder: _Holder):
        self.holder = holder

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        self.holder.set(None)


class _AtAttention:
    """Before a layer's attention: take the state out of the keyword arguments, and keep it for the layer's router if it has one."""

    def __init__(self, holder: _Holder, *, keep: bool):
        self.holder, self.keep = holder, keep

    def __call__(
        self, attention: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if STATE not in kwargs:
            return None
        if self.keep:
            self.holder.set(kwargs[STATE])
        return args, {name: value for name, value in kwargs.items() if name != STATE}


class _BeforeRouter:
    """Scale the router's tokens by the weights of their clusters."""

    def __init__(
        self,
        holder: _Holder,
        layer: int,
        previous: int,
        block: nn.Module,
        *,
        complete: bool,
        mix: bool,
        from_previous: bool,
        safe: bool,
    ):
        self.holder, self.layer, self.previous, self.block = holder, layer, previous, block
        self.complete, self.mix, self.from_previous, self.safe = complete, mix, from_previous, safe

    def __call__(self, gate: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        state = self.holder.get()
        if state is None:
            if not self.safe and self.block.training and getattr(self.block, "gradient_checkpointing", False):
                raise RuntimeError(
                    f"layer {self.layer} is recomputed without its routing state: {type(self.block).__name__} does not pass "
                    "keyword arguments on to its attention, so gradient checkpointing cannot be used with this patched model"
                )
            return None
        before = state.records.get(self.previous)
        if before is None or before.indices is None:
            return None
        hidden = args[0] if args else next(iter(kwargs.values()))
        tokens = hidden if hidden.ndim == 2 else hidden.reshape(-1, hidden.shape[-1])
        adaptive = gate.ac_weights
        assert isinstance(adaptive, AdaptiveWeights)
        if not torch.is_grad_enabled() and self.complete and not (self.mix or self.from_previous or is_watching()):
            # Generation, where each token waits for every step below.
            table = adaptive.resting(tokens.device)
            if table is not None:
                rows = before.indices.select(1, 0)
                rows = rows if rows.device == tokens.device else rows.to(tokens.device)
                return self._replaced(args, kwargs, scale_by_table(tokens, table, rows))
        record = state.record(self.layer)
        prev = before.indices if self.complete else flatten_assignment(before.indices, (tokens.shape[0],))
        scaling = adaptive.weigh(
            tokens,
            prev,
            gates=before.gates.to(tokens.device) if self.mix and before.gates is not None else None,
            mask=state.mask,
            shape=state.shape,
            record=record,
            statistics=before.next_statistics if self.from_previous else None,
            complete=self.complete,
        )
        if self.from_previous or is_watching():
            record.pending = (tokens, scaling.weights)
        return self._replaced(args, kwargs, scale_by_table(tokens, scaling.table, scaling.rows))

    @staticmethod
    def _replaced(args: tuple, kwargs: dict[str, Any], scaled: Tensor) -> tuple[tuple, dict[str, Any]]:
        """The router's arguments with the scaled tokens in place of the tokens."""
        if args:
            hidden = args[0]
            return (scaled if hidden.ndim == 2 else scaled.reshape(hidden.shape), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: scaled.reshape(kwargs[name].shape)}


class _AfterRouter:
    """Note what the router chose, for the next layer."""

    def __init__(
        self,
        holder: _Holder,
        layer: int,
        family: RouterFamily,
        *,
        previous: int | None,
        next_gate: nn.Module | None,
        keep_gates: bool,
        safe: bool,
    ):
        self.holder, self.layer, self.family, self.previous = holder, layer, family, previous
        self.next_gate, self.keep_gates, self.safe = next_gate, keep_gates, safe

    def __call__(self, gate: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        state = self.holder.get()
        if state is None:
            return
        if self.safe and torch.is_grad_enabled():
            self.holder.set(None)
        record = state.record(self.layer)
        indices = output[self.family.indices]
        if record.indices is None:  # A recomputed layer keeps what it chose the first time.
            record.indices = indices
            if self.keep_gates:
                record.gates = output[self.family.gates].detach()
        if self.next_gate is None and not is_watching():
            return
        hidden = args[0] if args else next(iter(kwargs.values()))
        tokens, weights = (hidden.reshape(-1, hidden.shape[-1]), None) if record.pending is None else record.pending
        record.pending = None
        if self.next_gate is not None and record.next_statistics is None:
            adaptive = self.next_gate.ac_weights
            assert isinstance(adaptive, AdaptiveWeights)
            labels = valid_labels(indices, state.mask).to(tokens.device)
            record.next_statistics = adaptive.statistics(tokens, labels)
        if is_watching():
            before = None if self.previous is None else state.records.get(self.previous)
            observe(
                gate,
                output[self.family.logits],
                indices,
                None if before is None else before.indices,
                weights,
                state.mask,
                plain=lambda: gate.forward(tokens)[self.family.logits],
            )
