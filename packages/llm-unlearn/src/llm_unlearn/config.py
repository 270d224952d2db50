"""`UnlearnConfig`: the arguments of an unlearning run, on top of transformers' `TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from transformers import TrainingArguments

from chapbook_shared.validate import check_choice, check_int, check_nonnegative, check_positive

from .losses import Direction
from .objectives import Hyperparameters, Method, Positions, parse_method

_ME_POSITIONS: dict[str, Positions] = {"nonpad": "nonpad", "answer": "answer", "padded": "padded"}
_KL_POSITIONS: dict[str, Positions] = {"nonpad": "tokens", "answer": "answer", "all": "all"}


@dataclass
class UnlearnConfig(TrainingArguments):
    """Defaults are the paper's TOFU settings (appendix) where it has any; see `TrainingArguments` for the rest.

    method: a forget loss, or `FORGET+REGULARIZER` (`parse_method`).
    forget_coeff, reg_coeff: `loss = forget_coeff * forget + reg_coeff * regulariser`.
    beta: of NPO, DPO and AP.
    me_direction: "uniform_to_model" (official code) or "model_to_uniform" (formula in the paper).
    me_positions: "nonpad" (question and answer), "answer", or "padded" (official: padding counts too, needs `pad_to`).
    kl_positions: "nonpad", "answer", or "all" (official: padding counts too).
    padding_free: lay all sequences of a batch out in one row. None tries the model on two short sequences and does so if its logits
        agree with those of padded ones.
    pad_to: pad every batch to this many tokens (the official loader's 500) instead of to its longest sequence.
    pairing: "fresh" draws retain items and refusals anew each epoch, "fixed" is the official code's one pair for each forget item.
    precompute_ref: score the reference once before training instead of keeping it (NPO and DPO; not for KL, which needs its logits).
    warmup_epochs: linear warm-up, used when warmup_steps is 0; one epoch, or none if an epoch is a single step.
    max_forget_loss: stop when the mean NLL of a batch of forget answers, in nats a token, passes this.
    strict: an overlap of forget and retain questions is an error instead of a warning.
    """

    output_dir: str | None = field(default="unlearned", metadata={"help": "Where checkpoints and the final model go."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay of AdamW."})
    num_train_epochs: float = field(default=5.0, metadata={"help": "Passes over the forget set."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay false."})
    report_to: str | list[str] | None = field(default="none", metadata={"help": "Integrations to report to."})
    method: str = field(default="ME+GD", metadata={"help": "Forget loss and regulariser, such as ME+GD or IDK+AP."})
    forget_coeff: float = field(default=1.0, metadata={"help": "Weight of the forget loss."})
    reg_coeff: float = field(default=1.0, metadata={"help": "Weight of the regulariser."})
    beta: float = field(default=0.1, metadata={"help": "beta of NPO, DPO and AP."})
    me_direction: Direction = field(
        default="uniform_to_model", metadata={"help": "Which of the two divergences ME is."}
    )
    me_positions: Literal["nonpad", "answer", "padded"] = field(default="nonpad", metadata={"help": "Where ME counts."})
    kl_positions: Literal["nonpad", "answer", "all"] = field(default="nonpad", metadata={"help": "Where KL counts."})
    max_length: int = field(default=512, metadata={"help": "Tokens of a sequence, at most."})
    padding_free: bool | None = field(
        default=None, metadata={"help": "One row without padding; None: if the model can."}
    )
    pad_to: int | None = field(default=None, metadata={"help": "Pad every batch to this many tokens."})
    pairing: Literal["fresh", "fixed"] = field(
        default="fresh", metadata={"help": "Pairing of forget with retain items."}
    )
    precompute_ref: bool = field(default=False, metadata={"help": "Score the reference before training."})
    warmup_epochs: float = field(default=1.0, metadata={"help": "Linear warm-up, in epochs."})
    max_forget_loss: float | None = field(default=None, metadata={"help": "Stop beyond this forget NLL a token."})
    strict: bool = field(default=False, metadata={"help": "Shared questions are an error."})
    simnpo_beta: float = field(default=2.5, metadata={"help": "beta of SimNPO."})
    simnpo_gamma: float = field(default=0.0, metadata={"help": "gamma of SimNPO."})
    wga_alpha: float = field(default=1.0, metadata={"help": "alpha of WGA."})
    rmu_layer: int = field(default=7, metadata={"help": "Hidden state that RMU works on (0 is the embedding)."})
    rmu_steering: float = field(default=20.0, metadata={"help": "Length of RMU's control vector."})

    def __post_init__(self) -> None:
        method = parse_method(self.method)
        for name in (
            "forget_coeff", "reg_coeff", "warmup_epochs", "learning_rate", "weight_decay", "simnpo_gamma", "wga_alpha",
        ):  # fmt: skip
            check_nonnegative(name, getattr(self, name))
        for name in ("beta", "simnpo_beta", "rmu_steering"):
            check_positive(name, getattr(self, name))
        if self.max_forget_loss is not None:
            check_positive("max_forget_loss", self.max_forget_loss)
            if "forget" not in method.parts:
                raise ValueError(f"max_forget_loss watches the forget answers, which {method.name} never reads")
        check_int("max_length", self.max_length, minimum=2)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            check_int(name, getattr(self, name), minimum=1)
        for name in ("seed", "rmu_layer"):
            check_int(name, getattr(self, name), minimum=0)
        check_int("max_steps", self.max_steps)
        if self.max_steps <= 0:
            check_positive("num_train_epochs", self.num_train_epochs)
        check_choice("me_direction", self.me_direction, ("uniform_to_model", "model_to_uniform"))
        check_choice("me_positions", self.me_positions, tuple(_ME_POSITIONS))
        check_choice("kl_positions", self.kl_positions, tuple(_KL_POSITIONS))
        check_choice("pairing", self.pairing, ("fresh", "fixed"))
        if self.pad_to is not None:
            check_int("pad_to", self.pad_to)
            if self.pad_to < self.max_length:
                raise ValueError(
                    f"pad_to must be >= max_length, got {self.pad_to} and {self.max_length}: set max_length={self.pad_to} too"
                )
        if self.me_positions == "padded" and self.pad_to is None and method.forget.name == "ME":
            raise ValueError(
                "me_positions='padded' counts padding, so it needs a fixed width: pass pad_to (500 in the official code)"
            )
        if self.padding_free and self.counts_padding(method):
            raise ValueError(
                "padding_free=True leaves no padding to count: use me_positions and kl_positions 'nonpad' or 'answer'"
            )
        if self.precompute_ref and method.references - {"nll"}:
            raise ValueError(
                f"precompute_ref=True keeps one number a sequence, but {method.name} needs the reference's "
                f"{' and '.join(sorted(method.references - {'nll'}))} at every step"
            )
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns must be False: the batches are not made of the model's own arguments"
            )
        super().__post_init__()

    def counts_padding(self, method: Method) -> bool:
        """Whether some objective of the method reads positions of padding."""
        hyper = self.hyperparameters()
        return any(o.positions_for(hyper) in ("padded", "all") for o in method.objectives)

    def hyperparameters(self) -> Hyperparameters:
        """What the objectives take."""
        return Hyperparameters(
            beta=self.beta,
            me_direction=self.me_direction,
            me_positions=_ME_POSITIONS[self.me_positions],
            kl_positions=_KL_POSITIONS[self.kl_positions],
            simnpo_beta=self.simnpo_beta,
            simnpo_gamma=self.simnpo_gamma,
            wga_alpha=self.wga_alpha,
            rmu_steering=self.rmu_steering,
            seed=self.seed,
        )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """`warmup_steps` if given, else `warmup_epochs`; no warm-up if an epoch is a single step."""
        if self.warmup_steps > 0:
            return super().get_warmup_steps(num_training_steps)
        epoch = num_training_steps / max(self.num_train_epochs, 1e-9)
        return round(epoch * self.warmup_epochs) if epoch > 1 else 0
