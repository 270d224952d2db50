"""The command `egovideo`: describe, train, embed, search and eval."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from chapbook_shared.jobs import SettingsMismatchError, Store, StoreLockedError
from chapbook_shared.lm import LanguageModel, LanguageModelError
from chapbook_shared.seeding import seed_everything
from chapbook_shared.validate import import_extra
from egovideo.clips import load_clip
from egovideo.describe import LLMCaptioner
from egovideo.detection import Detector, MediaPipeHands, Precomputed, TransformersDetector
from egovideo.evaluation import Ties, egomcq, mean_class_accuracy, mir, topk_accuracy
from egovideo.pipeline import HODPipeline, read_clips
from egovideo.rendering import ColorDetector
from egovideo.sheets import save_contact_sheet
from egovideo.trajectory import Trajectory

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Hand-object dynamics for egocentric video: captions that say how hands move, a model that sees it, the metrics.",
)
evaluation = typer.Typer(no_args_is_help=True, help="Zero-shot metrics of arrays in an .npz file.")
app.add_typer(evaluation, name="eval")

Clips = Annotated[
    Path,
    typer.Argument(help="JSON Lines: video, narration or caption, and start, end (seconds), id.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
ModelFolder = Annotated[Path, typer.Option("--model", help="A folder that `egovideo train` wrote.", show_default=False)]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 ...")]
Arrays = Annotated[Path, typer.Argument(help="An .npz file.", show_default=False)]
TieRule = Annotated[str, typer.Option(help="What equal similarities mean: stable, average or worst.")]


def main() -> None:
    """Entry point. Exit status 0: done; 1: some clips could not be read; 2: wrong use or bad input; 130: interrupted (the same
    command goes on)."""
    app()


@app.command()
def describe(
    clips: Clips,
    store: Annotated[Path, typer.Option(help="SQLite file of the run; the same command goes on with it.")] = Path(
        "hod.sqlite"
    ),
    detector: Annotated[
        str,
        typer.Option(
            help="precomputed:FILE (JSON Lines), transformers:NAME (hub id or folder), mediapipe:FILE (hand_landmarker.task), color."
        ),
    ] = "color",
    model: Annotated[str | None, typer.Option(help="Language model that rewrites; none: the template alone.")] = None,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint of --model; none: OpenAI's.")] = None,
    api_key_env: Annotated[str, typer.Option(help="Name of the variable that holds the key.")] = "OPENAI_API_KEY",
    local: Annotated[
        bool, typer.Option("--local", help="Run --model in this process (hub id, folder, or smollm2).")
    ] = False,
    frames: Annotated[int, typer.Option(help="Frames a clip.")] = 16,
    short_side: Annotated[int | None, typer.Option(help="Shorter side of the frames that the detector sees.")] = None,
    retries: Annotated[int, typer.Option(help="How often a caption that fails the check is asked for again.")] = 1,
    check: Annotated[bool, typer.Option(help="Check captions against the trajectory.")] = True,
    workers: Annotated[int, typer.Option(help="Videos at a time.")] = os.cpu_count() or 1,
    jsonl: Annotated[Path | None, typer.Option(help="Also write the records as JSON Lines.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Also write the records as Parquet.")] = None,
    sheets: Annotated[
        Path | None, typer.Option(help="Folder for contact sheets: boxes and ways of every clip with hands.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; read no video, ask no model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a sentence about hands and objects for each clip. Exits with 1 if some clips could not be read."""
    with _one_line_errors():
        entries = read_clips(clips)
        if dry_run:
            _show(_plan(entries, store, retries if model else None), as_json)
            return
        pipeline = HODPipeline(
            _detector(detector),
            LLMCaptioner(_language_model(model, base_url, api_key_env, local)) if model else None,
            num_frames=frames,
            short_side=short_side,
            retries=retries,
            check=check,
        )
        result = pipeline.run(entries.values(), store, workers=workers)
        with Store(store, read_only=True) as records:
            if jsonl:
                records.export_jsonl(jsonl)
            if parquet:
                records.export_parquet(parquet)
            if sheets:
                sheets.mkdir(parents=True, exist_ok=True)
                for _, record in records.items():
                    _sheet(record, sheets, frames)
    _show(result, as_json)
    raise typer.Exit(1 if result["errors"] else 0)


@app.command()
def train(
    clips: Clips,
    output: Annotated[Path, typer.Option(help="Folder for checkpoints and the model.")],
    model: Annotated[Path | None, typer.Option(help="A folder of this command, to train on.")] = None,
    clip: Annotated[
        str | None, typer.Option(help="A transformers CLIP or SigLIP (hub id or folder) to start from.")
    ] = None,
    stage: Annotated[
        str, typer.Option(help="pretrain (slow path), adapt (adapters and heads), joint (co-training).")
    ] = "joint",
    loss: Annotated[str, typer.Option(help="infonce or max_margin.")] = "infonce",
    slow_frames: Annotated[int, typer.Option(help="Frames of the slow path.")] = 4,
    fast_frames: Annotated[int, typer.Option(help="Frames of the fast path.")] = 16,
    epochs: Annotated[float, typer.Option(help="Epochs.")] = 15,
    batch_size: Annotated[int, typer.Option(help="Clips a device and step.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Constant.")] = 4e-5,
    flip: Annotated[
        str, typer.Option(help="swap: mirror half of the clips and exchange left and right in captions; none.")
    ] = "swap",
    on_error: Annotated[str, typer.Option(help="Files that cannot be read: raise, or skip.")] = "raise",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Less memory, more time.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
) -> None:
    """Train the two-rate encoder on clips with captions. Interrupted, the same command goes on from its last checkpoint."""
    with _one_line_errors():
        if (model is None) == (clip is None):
            raise ValueError("give --model, to train on, or --clip, to start from: one of them")
        entries = list(read_clips(clips).values())
        for entry in entries:
            entry.setdefault("caption", entry.get("narration"))
        training: Any = import_extra("egovideo.training", "egovideo[hf]")
        transformers = import_extra("transformers", "egovideo[hf]")
        seed_everything(seed)
        encoder: Any = import_extra("egovideo.encoder", "egovideo[hf]").EgoVideo
        if model is not None:
            made = encoder.from_pretrained(model)
        else:
            options = {"slow_frames": slow_frames, "fast_frames": fast_frames, "loss": loss}
            made = encoder.from_clip(transformers.AutoModel.from_pretrained(clip), **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model or clip)
        rates = (
            (made.slow_frames, made.fast_frames) if made.fast_frames and stage != "pretrain" else (made.slow_frames,)
        )
        config = training.EgoVideoConfig(
            output_dir=str(output),
            stage=stage,
            num_train_epochs=epochs,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            activation_checkpointing=checkpointing,
            dataloader_num_workers=min(4, os.cpu_count() or 1),
            save_strategy="epoch",
            report_to=[],
            seed=seed,
        )
        dataset = training.ClipDataset(entries, rates=rates, size=_image_size(made), flip=flip, on_error=on_error)
        trainer = training.EgoVideoTrainer(
            made, config, train_dataset=dataset, data_collator=training.ClipCollator(tokenizer)
        )
        trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*")))
        trainer.save_model(str(output))
        tokenizer.save_pretrained(output)
    print(f"wrote {output}", file=sys.stderr)


@app.command()
def embed(
    clips: Clips,
    model: ModelFolder,
    output: Annotated[
        Path, typer.Option(help="An .npz file: embeddings (n, dim), ids, and text (n, dim) of the captions.")
    ] = Path("clips.npz"),
    batch_size: Annotated[int, typer.Option(help="Clips at a time.")] = 8,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Embed clips and their captions. Exits with 1 if some could not be read; those are left out."""
    with _one_line_errors():
        entries = list(read_clips(clips).values())
        made, tokenizer = _encoder(model, device)
        vectors, ids, texts, failed = [], [], [], []
        for start in range(0, len(entries), batch_size):
            part, pixels = [], []
            for entry in entries[start : start + batch_size]:
                try:
                    pixels.append(_pixels(made, entry))
                    part.append(entry)
                except ValueError as error:
                    failed.append(f"{entry['id']}: {error}")
            if part:
                vectors.append(_embed_clips(made, pixels, device))
                ids += [entry["id"] for entry in part]
                texts += [str(entry.get("caption") or entry.get("narration") or "") for entry in part]
        if not ids:
            raise ValueError(
                f"none of the {len(entries)} clips can be read; the first: {failed[0] if failed else 'there is none'}"
            )
        np.savez(
            output,
            embeddings=np.concatenate(vectors),
            ids=np.array(ids),
            text=_embed_texts(made, tokenizer, texts, device),
        )
    for line in failed:
        print(line, file=sys.stderr)
    _show({"clips": len(ids), "failed": len(failed), "output": str(output)}, as_json)
    raise typer.Exit(1 if failed else 0)


@app.command()
def search(
    embeddings: Annotated[Path, typer.Argument(help="A file of `egovideo embed`.", show_default=False)],
    query: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
    model: ModelFolder,
    top: Annotated[int, typer.Option(help="How many clips to show.")] = 5,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Find the clips that fit a sentence."""
    with _one_line_errors():
        found = _arrays(embeddings, "embeddings", "ids")
        made, tokenizer = _encoder(model, device)
        scores = found["embeddings"] @ _embed_texts(made, tokenizer, [query], device)[0]
        order = np.argsort(-scores, kind="stable")[:top]
        hits = [{"id": str(found["ids"][i]), "similarity": round(float(scores[i]), 4)} for i in order]
    if as_json:
        _show({"hits": hits}, True)
    else:
        for hit in hits:
            print(f"{hit['similarity']:.4f}  {hit['id']}")


@evaluation.command("mir")
def eval_mir(
    arrays: Arrays,
    precision: Annotated[str, typer.Option(help="graded, as published numbers are, or binary.")] = "graded",
    ties: TieRule = "stable",
    as_json: AsJson = False,
) -> None:
    """mAP and nDCG of multi-instance retrieval. The file holds similarity and relevancy (videos, texts), or embeddings and text of equal
    length, which belong together row by row."""
    with _one_line_errors():
        found = _arrays(arrays)
        if "similarity" in found:
            found = _arrays(arrays, "similarity", "relevancy")
            similarity, relevancy = found["similarity"], found["relevancy"].astype(float)
        else:
            found = _arrays(arrays, "embeddings", "text")
            similarity = found["embeddings"] @ found["text"].T
            relevancy = np.eye(len(similarity))
        result = mir(similarity, relevancy, precision=precision, ties=ties)  # type: ignore[arg-type]
    _show(result, as_json)


@evaluation.command("cls")
def eval_cls(arrays: Arrays, ties: TieRule = "stable", as_json: AsJson = False) -> None:
    """Top-1, top-5 and mean class accuracy. The file holds scores (clips, classes) and labels (clips)."""
    with _one_line_errors():
        found = _arrays(arrays, "scores", "labels")
        scores, labels = found["scores"], found["labels"]
        rule: Ties = ties  # type: ignore[assignment]
        result = {f"top{k}": topk_accuracy(scores, labels, min(k, scores.shape[1]), ties=rule) for k in (1, 5)}
        result["mean_class"] = mean_class_accuracy(scores.argmax(1), labels)
    _show(result, as_json)


@evaluation.command("mcq")
def eval_mcq(arrays: Arrays, ties: TieRule = "stable", as_json: AsJson = False) -> None:
    """EgoMCQ. The file holds similarity (questions, 5), answers and types (1 inter, 2 intra)."""
    with _one_line_errors():
        found = _arrays(arrays, "similarity", "answers", "types")
        result = egomcq(found["similarity"], found["answers"], found["types"], ties=ties)  # type: ignore[arg-type]
    _show(result, as_json)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except SettingsMismatchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except (ValueError, TypeError, OSError, ImportError, StoreLockedError, LanguageModelError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None


def _detector(text: str) -> Detector | Precomputed:
    kind, _, rest = text.partition(":")
    if kind == "color" and not rest:
        return ColorDetector()
    if kind == "precomputed" and rest:
        return Precomputed(rest)
    if kind == "mediapipe" and rest:
        return MediaPipeHands(rest)
    if kind == "transformers" and rest:
        return TransformersDetector.from_pretrained(rest)
    raise ValueError(f"--detector must be precomputed:FILE, transformers:NAME, mediapipe:FILE or color, got {text!r}")


def _language_model(name: str, base_url: str | None, api_key_env: str, local: bool) -> LanguageModel:
    if local:
        models: Any = import_extra("chapbook_shared.lm.local_model", "egovideo[local]").LocalModel
        made: LanguageModel = models.smollm2() if name == "smollm2" else models.from_pretrained(name)
        return made
    endpoint: Any = import_extra("chapbook_shared.lm.openai_model", "egovideo[openai]").OpenAIModel
    remote: LanguageModel = endpoint(name, base_url=base_url, api_key_env=api_key_env)
    return remote


def _plan(entries: Mapping[str, Any], store: Path, retries: int | None) -> dict[str, Any]:
    done = 0
    if store.exists():
        with Store(store, read_only=True) as records:
            done = len(entries) - len(records.missing(entries))
    left = len(entries) - done
    return {
        "clips": len(entries),
        "done": done,
        "to_do": left,
        "model_requests_at_most": 0 if retries is None else left * (retries + 1),
    }


def _sheet(record: Mapping[str, Any], folder: Path, frames: int) -> None:
    if record["hands"] == "none":
        return
    clip = load_clip(record["video"], record["start"] or 0.0, record["end"], num_frames=frames, threads=1)
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in record["id"])
    trajectory = Trajectory.from_record(record["trajectory"])
    save_contact_sheet(folder / f"{name}.png", clip.frames, trajectory, caption=record["caption"])


def _encoder(folder: Path, device: str) -> tuple[Any, Any]:
    encoder: Any = import_extra("egovideo.encoder", "egovideo[hf]").EgoVideo
    transformers = import_extra("transformers", "egovideo[hf]")
    return encoder.from_pretrained(folder).to(device).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def _image_size(model: Any) -> int:
    config = getattr(model.vision.model, "config", None)
    size = getattr(config, "image_size", None) or model.vision.model.patch_embed.img_size
    return int(size if isinstance(size, int) else size[0])


def _pixels(model: Any, entry: Mapping[str, Any]) -> list[Any]:
    pixels: Any = import_extra("egovideo.training", "egovideo[hf]").ClipDataset
    rates = (model.slow_frames, model.fast_frames) if model.fast_frames else (model.slow_frames,)
    record = {**entry, "caption": entry.get("caption") or entry.get("narration") or " "}
    item = pixels([record], rates=rates, size=_image_size(model), train=False)[0]
    return [item[name] for name in ("slow", "fast") if name in item]


def _embed_clips(model: Any, pixels: Sequence[Sequence[Any]], device: str) -> np.ndarray:
    torch = import_extra("torch", "egovideo[torch]")
    with torch.no_grad():
        stacked = [torch.stack(rate).to(device) for rate in zip(*pixels, strict=True)]
        vectors: np.ndarray = model.encode_video(*stacked).float().cpu().numpy()
    return vectors


def _embed_texts(model: Any, tokenizer: Any, texts: Sequence[str], device: str) -> np.ndarray:
    torch = import_extra("torch", "egovideo[torch]")
    parts = []
    with torch.no_grad():
        for start in range(0, len(texts), 64):
            tokens = tokenizer(
                list(texts[start : start + 64]), padding=True, truncation=True, max_length=77, return_tensors="pt"
            )
            inputs = {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}
            parts.append(model.encode_text(**inputs).float().cpu().numpy())
    return np.concatenate(parts)


def _arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} must hold {', '.join(names)}; it holds {', '.join(found) or 'nothing'}")
    return found


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    for name, value in result.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
            print(f"{name}: {inner or '-'}")
        else:
            print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")


__all__ = ["app", "main"]
