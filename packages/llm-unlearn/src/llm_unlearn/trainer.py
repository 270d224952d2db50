"""`UnlearnTrainer`: transformers' Trainer on a forget and a retain set.

What differs from its parent: the data are pairs drawn by `DrawSampler`; all parts of a batch go through the model in one forward pass, which
computes only the rows of logits that the method reads; each mean is over the whole optimiser step (all micro-batches, all processes); and
what a method reads of the reference model comes from an adapter, a frozen copy or scores taken once.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainerCallback

from chapbook_shared.validate import import_extra

from .config import UnlearnConfig
from .data import Draw, DrawSampler, Example, RefusalPool, UnlearnCollator, UnlearnDataset, as_items, check_sets
from .objectives import Objective, Part, PartName, parse_method, with_reference
from .reference import (
    REFERENCE_ADAPTER,
    add_reference_adapter,
    as_reference,
    freeze_copy,
    has_adapter,
    is_fresh_adapter,
    prepare_copy,
)
from .scoring import score_answers

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class UnlearningDiverged(RuntimeError):
    """The loss became non-finite, or the forget loss passed `max_forget_loss`. `checkpoint` holds the weights before that step."""

    def __init__(self, reason: str, *, step: int, checkpoint: Path):
        self.step, self.checkpoint = step, checkpoint
        super().__init__(f"{reason} at step {step}; the weights before that step are in {checkpoint}")


def last_checkpoint(folder: str | Path) -> Path | None:
    """The last complete checkpoint in a folder. The trainer's state is written last: one without it was cut short."""
    found: dict[int, Path] = {}
    for place in Path(folder).glob("checkpoint-*"):
        number = place.name.removeprefix("checkpoint-")
        try:
            json.loads((place / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if number.isdecimal():
            found[int(number)] = place
    return found[max(found)] if found else None


class UnlearnTrainer(Trainer):
    """Unlearn `forget_dataset` by `args.method`, keeping `retain_dataset`.

    `model` is a causal LM (or a PEFT model, or a name to load) and, unless `ref_model` is given, the reference as it is when passed.
    Datasets are lists of mappings or `datasets.Dataset`s with columns question/answer, prompt/completion, messages or text.
    With `peft_config` a fresh adapter is trained and the base stays. `refusals` are sentences or a file with one a line; None is the packaged list.
    Logs `loss`, `loss/forget` and `loss/retain`. `evaluate()` gives the answer probabilities of both sets.
    """

    args: UnlearnConfig
    # Wider or narrower than the parent's: a PEFT model, a data set of draws, a collator of parts.
    model: Any
    train_dataset: Any
    data_collator: Any
    processing_class: Any

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | None = None,
        args: UnlearnConfig | None = None,
        *,
        forget_dataset: Any,
        retain_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        ref_model: PreTrainedModel | nn.Module | None = None,
        refusals: RefusalPool | Sequence[str] | str | Path | None = None,
        **kwargs: Any,
    ):
        args = args or UnlearnConfig()
        self.method = parse_method(args.method)
        self.hyper = args.hyperparameters()
        forget = as_items(forget_dataset)
        retain = None if retain_dataset is None else as_items(retain_dataset)
        check_sets(forget, retain, needs_retain=self.method.needs_retain, strict=args.strict, method=self.method.name)
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} devices, and nn.DataParallel cannot split these batches: "
                "start with torchrun or accelerate launch, or show one device (CUDA_VISIBLE_DEVICES)"
            )
        pool = refusals if isinstance(refusals, RefusalPool) else RefusalPool(refusals)
        if self.method.needs_refusals and refusals is None:
            logger.info("%s needs refusals: using the packaged pool of %d", self.method.name, len(pool))
        if model is None:
            raise ValueError("model must be a causal language model or a name to load, got None")
        if isinstance(model, str):
            processing_class = processing_class or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model)
        if processing_class is None:
            name = getattr(getattr(model, "config", None), "name_or_path", "")
            if not name:
                raise ValueError(
                    "processing_class must be the model's tokenizer: the model does not say where it came from"
                )
            processing_class = AutoTokenizer.from_pretrained(name)
        adapted: Any = _with_adapter(model, peft_config, args)

        dataset = UnlearnDataset(
            processing_class,
            forget,
            retain,
            parts=self.method.parts,
            refusals=pool,
            max_length=args.max_length,
            pairing=args.pairing,
            seed=args.seed,
        )
        positions = {
            part: objective.positions_for(self.hyper)
            for objective in self.method.objectives
            for part in objective.parts
        }
        packed = _choose_packing(adapted, args, counts_padding=args.counts_padding(self.method))
        pad = (
            processing_class.pad_token_id
            if processing_class.pad_token_id is not None
            else processing_class.eos_token_id
        )
        collator = UnlearnCollator(
            self.method.parts, positions, pad_token_id=0 if pad is None else pad, packed=packed, pad_to=args.pad_to
        )
        self._keeps_rows = packed and "logits_to_keep" in _forward_parameters(adapted)
        self._forget_items, self._retain_items = forget, retain or []
        self._ref_scores: dict[tuple[PartName, int, int], float] | None = None
        self._ref_adapter: str | None = None
        self._ref_model: nn.Module | None = None
        self._logged: dict[str, Tensor] = {}
        self._logged_steps = 0
        self._sampler: DrawSampler | None = None
        self._given_ref = ref_model

        checkpointing = args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
        if checkpointing and has_adapter(adapted) and hasattr(adapted, "enable_input_require_grads"):
            adapted.enable_input_require_grads()
        super().__init__(
            model=adapted,
            args=args,
            data_collator=collator,
            train_dataset=dataset,
            eval_dataset=kwargs.pop("eval_dataset", [{}]),
            processing_class=processing_class,
            **kwargs,
        )
        # The loss comes out of `compute_loss` divided by the counts of the whole step, so the parent divides by nothing.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.add_callback(_EpochToSampler(self))
        self._set_reference(ref_model)

    # The data.

    def _get_train_sampler(self, train_dataset: Any = None) -> DrawSampler:
        per_round = self._train_batch_size * self.args.world_size
        self._sampler = DrawSampler(
            len(self.train_dataset), seed=self.args.seed, multiple_of=per_round if self.args.world_size > 1 else 1
        )
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and pairing the next pass over the data has."""
        if self._sampler is not None:
            self._sampler.epoch = epoch

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of one optimiser step, and the counts (parts, 3) of the whole step over all processes."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = sum((batch["counts"].cpu() for batch in batches), start=torch.zeros(len(self.method.parts), 3))
        if self.args.world_size > 1:
            gathered = self.accelerator.gather(counts.to(device, torch.float32)[None])
            counts = gathered.sum(0)
        return batches, counts.to(device, torch.float32)

    # The loss.

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`forget_coeff * forget + reg_coeff * regulariser` of one micro-batch, as its share of the step's means."""
        counts = inputs["counts"] if num_items_in_batch is None else num_items_in_batch
        reference = self._reference_parts(inputs)
        parts, outputs = self._forward(model, inputs, tuple(self.method.parts))
        for name, seen in reference.items():
            parts[name] = with_reference(parts[name], seen)
        coefficients = (self.args.forget_coeff, self.args.reg_coeff)
        total: Tensor | None = None
        for objective, coefficient, label in zip(
            self.method.objectives, coefficients, ("loss/forget", "loss/retain"), strict=False
        ):
            mean = objective.compute(parts, self.hyper) / self._divisor(objective, counts)
            self._log_part(label, mean)
            total = mean * coefficient if total is None else total + mean * coefficient
        assert total is not None
        self._check(total, parts, inputs)
        # The processes' gradients are averaged: their shares of the step's mean have to be summed.
        share = total * self.args.world_size if num_items_in_batch is not None else total
        return (share, outputs) if return_outputs else share

    def _divisor(self, objective: Objective, counts: Tensor) -> Tensor:
        column = {"token": 0, "position": 1, "sequence": 2}[objective.per]
        return counts[self.method.parts.index(objective.parts[0]), column].clamp(min=1)

    def _forward(
        self, model: nn.Module, inputs: Mapping[str, Any], names: Sequence[PartName]
    ) -> tuple[dict[PartName, Part], Any]:
        """The parts `names` of a batch, seen by `model` in one forward pass."""
        chosen = _select(inputs, self.method.parts, names)
        given: dict[str, Any] = {name: chosen[name] for name in _MODEL_INPUTS if name in chosen}
        hidden_wanted = "hidden" in self.method.references
        if self._keeps_rows:
            given["logits_to_keep"] = chosen["rows"]
        outputs = model(**given, use_cache=False, output_hidden_states=hidden_wanted)
        logits = outputs.logits
        logits = logits[0] if self._keeps_rows else logits.flatten(0, 1)[chosen["rows"]]
        hidden: Sequence[Tensor | None] = [None] * len(names)
        if hidden_wanted:
            if self.args.rmu_layer >= len(outputs.hidden_states):
                raise ValueError(
                    f"rmu_layer must be < {len(outputs.hidden_states)} for this model, got {self.args.rmu_layer}"
                )
            layer = outputs.hidden_states[self.args.rmu_layer]
            hidden = layer.flatten(0, 1)[chosen["rows"]].split(chosen["part_rows"])
        parts = {
            name: Part(logit_rows, targets, answer, sequence, n_sequences, hidden=hidden_rows)
            for name, n_sequences, hidden_rows, logit_rows, targets, answer, sequence in zip(
                names,
                chosen["part_sequences"],
                hidden,
                # One split, not slices: its backward writes the gradient of the logits once.
                logits.split(chosen["part_rows"]),
                chosen["targets"].split(chosen["part_rows"]),
                chosen["answer"].split(chosen["part_rows"]),
                chosen["sequence"].split(chosen["part_rows"]),
                strict=True,
            )
        }
        return parts, outputs

    def _log_part(self, label: str, mean: Tensor) -> None:
        if self.model.training:
            self._logged[label] = self._logged.get(label, 0) + mean.detach().float()

    def _check(self, total: Tensor, parts: Mapping[PartName, Part], inputs: Mapping[str, Any]) -> None:
        """Stop rule: all processes stop together, before the step is taken."""
        if not self.model.training:
            return
        bad = ~total.detach().isfinite()
        limit = self.args.max_forget_loss
        forget_nll = torch.zeros((), device=total.device)
        if limit is not None and "forget" in parts:
            with torch.no_grad():
                token_nll = parts["forget"].token_nll
                forget_nll = token_nll.mean() if token_nll.numel() else forget_nll
        flags = torch.stack([bad.float(), forget_nll.float()])
        if self.args.world_size > 1:
            flags = self.accelerator.gather(flags[None]).amax(0)
        non_finite, worst = flags.tolist()
        if non_finite:
            self._stop(f"the loss of {self.method.name} is not finite")
        if limit is not None and not worst <= limit:
            self._stop(f"the forget answers' mean NLL {worst:.4g} passed max_forget_loss={limit:g}")

    def _stop(self, reason: str) -> None:
        checkpoint = Path(self.args.output_dir or ".") / "last-good"
        self.save_model(str(checkpoint))
        raise UnlearningDiverged(reason, step=self.state.global_step + 1, checkpoint=checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The parent's, with the two parts of the loss."""
        if "loss" in logs and self._logged:
            steps = max(self.state.global_step - self._logged_steps, 1)
            for label, total in self._logged.items():
                value = total
                if self.args.world_size > 1:
                    value = self.accelerator.gather(total[None]).sum()
                logs[label] = float(value) / steps
            self._logged, self._logged_steps = {}, self.state.global_step
        super().log(logs, start_time)

    # The reference.

    def _set_reference(self, given: nn.Module | None) -> None:
        if not self.method.references or self.args.precompute_ref:
            return
        if given is not None:
            self._ref_model = prepare_copy(self.accelerator, given.eval().requires_grad_(False))
        elif has_adapter(self.model):
            if not is_fresh_adapter(self.model):
                add_reference_adapter(self.model)
                self._ref_adapter = REFERENCE_ADAPTER
        else:
            self._ref_model = prepare_copy(self.accelerator, freeze_copy(self.model))

    def use_base_as_reference(self) -> None:
        """Take the model without any adapter as the reference, also if the adapter was trained before."""
        if not has_adapter(self.model):
            raise ValueError("the model has no adapter to switch off: pass ref_model instead")
        if self._ref_adapter is not None:
            self.model.delete_adapter(self._ref_adapter)
            self._ref_adapter = None

    def _reference_parts(self, inputs: Mapping[str, Any]) -> dict[PartName, Part]:
        """What the method reads of the reference, for the parts it reads it on."""
        names = tuple(
            dict.fromkeys(part for o in self.method.objectives if o.reference is not None for part in o.parts)
        )
        if not names:
            return {}
        if self._ref_scores is not None:
            return {name: self._scored_part(name, inputs) for name in names}
        if self._ref_model is not None:
            with torch.no_grad():
                parts, _ = self._forward(self._ref_model, inputs, names)
        else:
            wrapped: Any = self.model_wrapped if self.is_in_train else self.model
            with as_reference(self.accelerator.unwrap_model(self.model), adapter=self._ref_adapter):
                parts, _ = self._forward(wrapped, inputs, names)
        scored = {part for o in self.method.objectives if o.reference == "nll" for part in o.parts}
        return {name: _as_reference_part(part, need_nll=name in scored) for name, part in parts.items()}

    def _scored_part(self, name: PartName, inputs: Mapping[str, Any]) -> Part:
        assert self._ref_scores is not None
        device = inputs["rows"].device
        scores = [self._ref_scores[_score_key(name, *draw)] for draw in inputs["draws"]]
        empty = torch.empty(0, device=device)
        return Part(empty, empty, empty, empty, len(scores), ref_nll=torch.tensor(scores, device=device))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The parent's; with `precompute_ref` the reference is scored first, once. True resumes from the last complete checkpoint."""
        if self.method.references and self.args.precompute_ref and self._ref_scores is None:
            self._ref_scores = self._precompute()
        if resume_from_checkpoint is True:
            found = last_checkpoint(self.args.output_dir or ".")
            resume_from_checkpoint = str(found) if found is not None else True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _precompute(self) -> dict[tuple[PartName, int, int], float]:
        """Reference NLL of every sequence that training will meet: forget answers, and refusals where the method reads them."""
        dataset: UnlearnDataset = self.train_dataset
        wanted: dict[tuple[PartName, int, int], Example] = {}
        parts = {part for o in self.method.objectives if o.reference == "nll" for part in o.parts}
        if "forget" in parts:
            wanted |= {("forget", i, 0): dataset.forget_example(i) for i in range(len(dataset))}
        if "forget_idk" in parts:
            for epoch in range(math.ceil(self._epochs())):
                for index in range(len(dataset)):
                    _, refusal = dataset.pair(Draw(epoch, index))
                    wanted["forget_idk", index, refusal] = dataset.refused_example(index, refusal)
        model: Any = self._given_ref if self._given_ref is not None else self.model
        model.to(self.args.device)
        scores = score_answers(
            model,
            list(wanted.values()),
            pad_token_id=self.data_collator.pad_token_id,
            batch_size=self.args.eval_batch_size,
        )
        return {key: score.nll for key, score in zip(wanted, scores, strict=True)}

    def _epochs(self) -> float:
        if self.args.max_steps <= 0:
            return self.args.num_train_epochs
        batch = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return self.args.max_steps * batch / len(self.train_dataset) + 1

    # Evaluation and saving.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean answer probability exp(-NLL a token) of the forget and retain sets, or of the named sets in a mapping. Every process scores all."""
        sets: Mapping[str, Any]
        if isinstance(eval_dataset, Mapping):
            sets = eval_dataset
        elif eval_dataset is not None:
            sets = {"": eval_dataset}
        else:
            sets = {"forget": self._forget_items, "retain": self._retain_items}
        metrics: dict[str, float] = {}
        for name, items in sets.items():
            rows = as_items(items)
            if not rows:
                continue
            scores = score_answers(
                self.model_wrapped if self.is_fsdp_enabled or self.is_deepspeed_enabled else self.model,
                rows,
                self.processing_class,
                max_length=self.args.max_length,
                batch_size=self.args.eval_batch_size,
            )
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            metrics[f"{prefix}_probability"] = sum(math.exp(-s.mean) for s in scores) / len(scores)
            metrics[f"{prefix}_loss"] = sum(s.mean for s in scores) / len(scores)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The parent's; explains why a quantised base cannot be saved."""
        try:
            super().save_model(output_dir, _internal_call)
        except ValueError as error:
            if "serializable" not in str(error) and "quantiz" not in str(error).lower():
                raise
            raise ValueError(
                "this model's weights are quantised or come from a GGUF file, which transformers cannot write back: unlearn with "
                "peft_config and save the adapter, or load it with dtype=torch.float32, delete model.config.quantization_config, and save"
            ) from error


class _EpochToSampler(TrainerCallback):
    """The order and the pairing depend on the epoch's number, also after a resume in the middle of one."""

    def __init__(self, trainer: UnlearnTrainer):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._logged_steps = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.set_epoch(int(state.epoch or 0))


def _with_adapter(model: Any, peft_config: Any, args: UnlearnConfig) -> Any:
    quantized = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    if peft_config is not None:
        peft = import_extra("peft", "llm-unlearn[peft]")
        if has_adapter(model):
            raise ValueError(
                "the model has an adapter already and peft_config was given too: merge it first, or pass one of them"
            )
        return peft.get_peft_model(model, peft_config)
    if (
        quantized
        and not has_adapter(model)
        and not any(p.requires_grad and p.is_floating_point() for p in model.parameters())
    ):
        raise ValueError("a quantised model can only be unlearned through an adapter: pass peft_config")
    return model


def _forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    base = model.get_base_model() if has_adapter(model) else model
    return inspect.signature(base.forward).parameters


def _choose_packing(model: Any, args: UnlearnConfig, *, counts_padding: bool) -> bool:
    if counts_padding or args.pad_to is not None or args.padding_free is False:
        if args.padding_free and args.pad_to is not None:
            raise ValueError("padding_free=True and pad_to exclude each other")
        return False
    able = "position_ids" in _forward_parameters(model)
    if able and args.padding_free is None:
        try:
            able = _packs(model)
        except Exception as error:
            logger.info("no padding-free batches: the model could not be tried on one (%s)", error)
            able = False
    if args.padding_free and not able:
        raise ValueError(f"padding_free=True, but {type(model).__name__} takes no position_ids")
    return able


@torch.no_grad()
def _packs(model: Any) -> bool:
    """Whether two sequences in one row give the same logits as each alone."""
    parameters = list(model.parameters())
    if any(p.numel() == 0 or p.is_meta for p in parameters):
        return False  # sharded already
    device = parameters[0].device
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(9, device=device) * 7 + 3) % vocab
    lengths = (5, 4)
    was_training = model.training
    model.eval()
    try:
        places = torch.cat([torch.arange(n, device=device) for n in lengths])
        together = model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0].float()
        alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids.split(lengths)])
        gap = (together - alone).abs().max()
        if "logits_to_keep" in _forward_parameters(model):
            keep = torch.tensor([8, 1], device=device)
            kept = model(input_ids=ids[None], position_ids=places[None], use_cache=False, logits_to_keep=keep).logits[0]
            gap = torch.maximum(gap, (kept.float() - together[keep]).abs().max())
    finally:
        model.train(was_training)
    # Rounding differs with the shapes of the products: nothing here is equal to the last digit.
    tolerance = 1e-3 if parameters[0].dtype in (torch.float32, torch.float64) else 5e-2
    return bool(gap <= tolerance * alone.abs().max().clamp(min=1))


def _select(inputs: Mapping[str, Any], all_names: Sequence[PartName], names: Sequence[PartName]) -> Mapping[str, Any]:
    """The batch that holds only the parts `names`."""
    if tuple(names) == tuple(all_names):
        return inputs
    chosen = [all_names.index(name) for name in names]
    packed = "position_ids" in inputs
    axis = 1 if packed else 0
    width = 1 if packed else inputs["input_ids"].shape[1]
    tokens = inputs["part_tokens"]
    starts = [sum(tokens[:i]) for i in range(len(tokens))]
    out: dict[str, Any] = {}
    for name in _MODEL_INPUTS:
        if name in inputs:
            pieces = inputs[name].split(tokens, dim=axis)
            out[name] = torch.cat([pieces[i] for i in chosen], dim=axis)
    rows = inputs["rows"].split(inputs["part_rows"])
    moved, shift = [], 0
    for i in chosen:
        moved.append(rows[i] + (shift - starts[i]) * width)
        shift += tokens[i]
    out["rows"] = torch.cat(moved)
    for name in ("targets", "answer", "sequence"):
        pieces = inputs[name].split(inputs["part_rows"])
        out[name] = torch.cat([pieces[i] for i in chosen])
    for name in ("part_rows", "part_sequences"):
        out[name] = [inputs[name][i] for i in chosen]
    return out


def _as_reference_part(part: Part, *, need_nll: bool) -> Part:
    # Also where a process holds only fillers, and so no row: its NLL has no entries then, but it is there.
    nll = part.nll if need_nll else None
    return Part(
        part.logits, part.targets, part.answer, part.sequence, part.n_sequences, ref_nll=nll, hidden=part.hidden
    )


def _score_key(name: PartName, index: int, refusal: int) -> tuple[PartName, int, int]:
    return (name, index, 0 if name == "forget" else refusal)
