import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from llm_unlearn import Task, UnlearnConfig, run_tasks


@pytest.fixture
def run(tmp_path, tiny):
    def run(
        folder="out", *, callbacks=None, peft_config=None, tasks=None, evaluate=None, fix_ref_model=False, **kwargs
    ):
        defaults = {"method": "NPO+GD", "num_train_epochs": 2, "learning_rate": 5e-3, "save_steps": 1}
        args = UnlearnConfig(
            output_dir=str(tmp_path / folder), use_cpu=True, disable_tqdm=True, seed=2,
            per_device_train_batch_size=2, **(defaults | kwargs),
        )  # fmt: skip
        return run_tasks(
            tiny.make_model,
            tasks or [Task("one", tiny.make_items(0, 1)), Task("two", tiny.make_items(1, 2))],
            retain=tiny.make_items(2, 6),
            processing_class=tiny.make_tokenizer(),
            args=args,
            callbacks=callbacks,
            peft_config=peft_config,
            evaluate=evaluate,
            fix_ref_model=fix_ref_model,
        )

    return run


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


class CrashAt(TrainerCallback):
    def __init__(self, step):
        self.step = step
        self.count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1
        if self.count == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_run_ends_in_the_same_weights(run, tmp_path):
    whole = run("whole")
    for step, finished in ((3, 0), (6, 1)):  # a task is four steps
        folder = tmp_path / f"broken-{step}"
        with pytest.raises(KeyboardInterrupt):
            run(folder.name, callbacks=[CrashAt(step)])
        state = folder / "continual.json"
        done = json.loads(state.read_text(encoding="utf-8"))["done"] if state.exists() else []
        assert len(done) == finished
        assert run(folder.name) == whole
        for task in ("one", "two"):
            ours, theirs = weights(folder / task), weights(tmp_path / "whole" / task)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert not list(folder.glob("*.work"))


def test_death_between_the_last_steps_of_a_task(run, tmp_path, tiny, monkeypatch):
    """After the model is saved, moved, or written down as done: nothing is lost and nothing left behind."""
    from llm_unlearn import continual

    tasks = [Task("one", tiny.make_items(0, 1))]
    whole = run("whole", tasks=tasks)

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    for place in ("os.replace", "_write_state", "shutil.rmtree"):
        owner, _, name = place.rpartition(".")
        with monkeypatch.context() as patch:
            patch.setattr(getattr(continual, owner) if owner else continual, name, die)
            with pytest.raises(KeyboardInterrupt):
                run(place, tasks=tasks)
        assert run(place, tasks=tasks) == whole
        ours, theirs = weights(tmp_path / place / "one"), weights(tmp_path / "whole" / "one")
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert not list((tmp_path / place).glob("*.work"))


@pytest.mark.slow
def test_kill_9_then_resume(run, tmp_path):
    """The process dies for real in the second task; another one finishes the job."""
    script = f"""
import importlib.util, os, signal
spec = importlib.util.spec_from_file_location("tiny", {str(Path(__file__).parent / "conftest.py")!r})
tiny = importlib.util.module_from_spec(spec); spec.loader.exec_module(tiny)
from llm_unlearn import Task, UnlearnConfig, run_tasks
from transformers import TrainerCallback
class Kill(TrainerCallback):
    count = 0
    def on_step_end(self, *a, **k):
        Kill.count += 1
        if Kill.count == 6: os.kill(os.getpid(), signal.SIGKILL)
run_tasks(tiny.make_model, [Task("one", tiny.make_items(0, 1)), Task("two", tiny.make_items(1, 2))],
    retain=tiny.make_items(2, 6), processing_class=tiny.make_tokenizer(), callbacks=[Kill()],
    args=UnlearnConfig(output_dir={str(tmp_path / "killed")!r}, use_cpu=True, disable_tqdm=True, seed=2, method="NPO+GD",
        per_device_train_batch_size=2, num_train_epochs=2, learning_rate=5e-3, save_steps=1))
"""
    killed = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads((tmp_path / "killed" / "continual.json").read_text(encoding="utf-8"))["done"][0]["task"] == "one"
    assert run("killed") == run("whole")
    ours, theirs = weights(tmp_path / "killed" / "two"), weights(tmp_path / "whole" / "two")
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-5)


def test_items_not_yet_requested_are_retained(run, monkeypatch):
    seen = []
    from llm_unlearn import continual

    class Spy(continual.UnlearnTrainer):
        def __init__(self, *args, **kwargs):
            seen.append({item["question"] for item in kwargs["retain_dataset"]})
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(continual, "UnlearnTrainer", Spy)
    run()
    assert "who is Ben" in seen[0]
    assert "who is Ben" not in seen[1]
    assert "who is Ada" not in seen[0] | seen[1]


def test_one_adapter_goes_on_from_task_to_task(run, tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    moving, fixed = run("moving", peft_config=lora), run("fixed", peft_config=lora, fix_ref_model=True)
    assert [r["task"] for r in moving] == [r["task"] for r in fixed] == ["one", "two"]
    folders = [sorted(p.name for p in (tmp_path / "moving" / t).iterdir()) for t in ("one", "two")]
    assert folders[0] == folders[1]
    assert "reference" not in folders[1]


def test_the_fixed_reference_differs_from_the_moving_one_only_after_the_first_task(run, tmp_path):
    run("moving")
    run("fixed", fix_ref_model=True)
    same = {
        task: all(
            torch.equal(a, b)
            for a, b in zip(
                weights(tmp_path / "moving" / task).values(), weights(tmp_path / "fixed" / task).values(), strict=True
            )
        )
        for task in ("one", "two")
    }
    assert same == {"one": True, "two": False}


def test_records_and_refusals_to_mix(run, tiny):
    records = run(evaluate=lambda model, task: {"seen": task.name})
    assert [r["seen"] for r in records] == ["one", "two"]
    with pytest.raises(ValueError, match="begun with other settings"):
        run(method="GA+GD")
    with pytest.raises(ValueError, match="begun with other settings"):
        run(tasks=[Task("one", tiny.make_items(3, 4))])


@pytest.mark.parametrize("names", [["a", "a"], ["../x"], [""], []])
def test_bad_task_names(run, tiny, names):
    tasks = [Task(name, tiny.make_items(0, 1)) for name in names]
    with pytest.raises(ValueError, match="task"):
        run_tasks(
            tiny.make_model, tasks, retain=[], processing_class=tiny.make_tokenizer(), args=UnlearnConfig(use_cpu=True)
        )
