"""Requests that arrive one after another: each starts from the model that the one before left, and all can be resumed."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback

from chapbook_shared.jobs import atomic_write
from chapbook_shared.seeding import derive_seed
from chapbook_shared.validate import import_extra

from .config import UnlearnConfig
from .data import Item, as_items, fingerprint
from .reference import REFERENCE_ADAPTER, has_adapter
from .trainer import UnlearnTrainer, last_checkpoint

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STATE_FILE = "continual.json"


@dataclass(frozen=True)
class Task:
    """One request: its name (also that of its folder) and what to forget."""

    name: str
    forget: Sequence[Item] | Any


def run_tasks(
    load_model: Callable[[], Any] | str,
    tasks: Sequence[Task],
    *,
    retain: Any,
    processing_class: PreTrainedTokenizerBase,
    args: UnlearnConfig,
    peft_config: PeftConfig | None = None,
    fix_ref_model: bool = False,
    evaluate: Callable[[Any, Task], Mapping[str, Any]] | None = None,
    **trainer_arguments: Any,
) -> list[dict[str, Any]]:
    """Unlearn the tasks in turn; returns one record a task, also kept in `<output_dir>/continual.json`.

    load_model: a function that loads the model before the first task, or its name. It is called again for `fix_ref_model` and on resume.
    retain: what every task retains; the forget items of tasks still to come are added.
    fix_ref_model: the reference of every task is the first model instead of the one before (what steadies NPO).
    peft_config: one adapter on one base, trained on from task to task.
    evaluate: called with the model and the task after each; its numbers go into the record.

    The final model of a task is in `<output_dir>/<name>`, moved there whole; only then does the state say so. Called again after a crash,
    done tasks are skipped and an interrupted one goes on from its last checkpoint. Other tasks or settings in the same folder are an error.
    """
    _check(tasks)
    output = Path(args.output_dir or "unlearned")
    output.mkdir(parents=True, exist_ok=True)
    base_retain = as_items(retain if retain is not None else [])
    prepared = [(task, as_items(task.forget)) for task in tasks]
    settings = _settings(prepared, base_retain, args, fix_ref_model, peft_config)
    records = _read_state(output, settings)
    for k, (task, forget) in enumerate(prepared):
        if k < len(records):
            logger.info("task %s is done", task.name)
            shutil.rmtree(
                output / f"{task.name}.work", ignore_errors=True
            )  # of a run that died before it had cleared up
            continue
        later = [item for _, items in prepared[k + 1 :] for item in items]
        model = _start(load_model, output, records, peft_config)
        work = output / f"{task.name}.work"
        trainer = UnlearnTrainer(
            model,
            replace_args(args, output_dir=str(work), seed=derive_seed(args.seed, "task", k) % 2**31),
            forget_dataset=forget,
            retain_dataset=[*base_retain, *later],
            processing_class=processing_class,
            peft_config=peft_config if not has_adapter(model) else None,
            ref_model=_load(load_model) if fix_ref_model and not peft_config else None,
            **trainer_arguments,
        )
        if fix_ref_model and peft_config:
            trainer.use_base_as_reference()
        trainer.remove_callback(PrinterCallback)  # the records say it all
        trainer.train(resume_from_checkpoint=last_checkpoint(work) is not None)
        record = {"task": task.name, "method": args.method, "steps": trainer.state.global_step}
        if evaluate is not None:
            record |= dict(evaluate(trainer.model, task))
        _keep(trainer, work, output / task.name)
        records.append(record)
        _write_state(output, settings, records)
        shutil.rmtree(work, ignore_errors=True)
    return records


def replace_args(args: UnlearnConfig, **changes: Any) -> UnlearnConfig:
    """A copy of the arguments with some changed."""
    changed = copy.copy(args)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _check(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise ValueError("tasks is empty: give at least one")
    names = [task.name for task in tasks]
    for name in names:
        if not name or name != Path(name).name or name.startswith(".") or name.endswith(".work") or name == STATE_FILE:
            raise ValueError(f"a task's name is that of its folder, so {name!r} will not do")
    if len(set(names)) < len(names):
        raise ValueError(f"task names must differ, got {', '.join(names)}")


def _settings(
    prepared: Sequence[tuple[Task, list[dict[str, Any]]]],
    retain: list[dict[str, Any]],
    args: UnlearnConfig,
    fix_ref_model: bool,
    peft_config: Any,
) -> dict[str, Any]:
    return {
        "tasks": [[task.name, fingerprint(items)] for task, items in prepared],
        "retain": fingerprint(retain),
        "hyperparameters": {
            **vars(args.hyperparameters()),
            "method": args.method,
            "forget_coeff": args.forget_coeff,
            "reg_coeff": args.reg_coeff,
            "learning_rate": args.learning_rate,
            "epochs": args.num_train_epochs,
            "max_steps": args.max_steps,
        },
        "fix_ref_model": fix_ref_model,
        "adapter": peft_config is not None,
    }


def _read_state(output: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    path = output / STATE_FILE
    if not path.exists():
        return []
    state = json.loads(path.read_text(encoding="utf-8"))
    if state["settings"] != json.loads(json.dumps(settings)):
        differing = [name for name in settings if state["settings"].get(name) != json.loads(json.dumps(settings[name]))]
        raise ValueError(
            f"{path} was begun with other settings ({', '.join(differing)}): use another output_dir, or the settings it was begun with"
        )
    return list(state["done"])


def _write_state(output: Path, settings: dict[str, Any], records: list[dict[str, Any]]) -> None:
    with atomic_write(output / STATE_FILE) as file:
        json.dump({"settings": settings, "done": records}, file, ensure_ascii=False, indent=1)


def _start(load_model: Callable[[], Any] | str, output: Path, records: list[dict[str, Any]], peft_config: Any) -> Any:
    """The model that the last finished task left, or the first one."""
    if not records:
        return _load(load_model)
    last = output / records[-1]["task"]
    if peft_config is not None:
        peft = import_extra("peft", "llm-unlearn[peft]")
        return peft.PeftModel.from_pretrained(_load(load_model), last, is_trainable=True)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(last)


def _load(load_model: Callable[[], Any] | str) -> Any:
    if not isinstance(load_model, str):
        return load_model()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(load_model)


def _keep(trainer: UnlearnTrainer, work: Path, place: Path) -> None:
    """Save the final model and move it to its place whole."""
    complete = work / "final"
    if has_adapter(trainer.model) and REFERENCE_ADAPTER in trainer.model.peft_config:
        trainer.model.delete_adapter(REFERENCE_ADAPTER)
    trainer.save_model(str(complete))
    if trainer.is_world_process_zero():
        if place.exists():  # moved by a run that died before it wrote the state
            shutil.rmtree(place)
        os.replace(complete, place)
    trainer.accelerator.wait_for_everyone()
