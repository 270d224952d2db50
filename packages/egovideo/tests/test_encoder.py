"""The two-rate encoder: stages, gradients of the fast path, saving, and the Trainer."""

import json
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from chapbook_shared.media import write_video
from egovideo import EgoVideo, MediaError
from egovideo.encoder import STAGES

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def towers():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL, image_size=32, patch_size=16))
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**SMALL, vocab_size=99, eos_token_id=98))
    return vision, text


def model(**options):
    made = EgoVideo(*towers(), **{"slow_frames": 2, "fast_frames": 4, "embed_dim": 16, **options})
    with torch.no_grad():
        for layer in made.vision.model.encoder.layers:  # adapters that are no longer identities
            layer.motion_adapter.up.weight.normal_(std=0.1)
    return made


def batch(n=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 90, (n, 5), generator=g)
    ids[:, -1] = 98
    return {
        "slow": torch.randn(n, 2, 3, 32, 32, generator=g),
        "fast": torch.randn(n, 4, 3, 32, 32, generator=g),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def gradients(made, **inputs):
    made.zero_grad()
    made(**(inputs or batch())).loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


def test_embeddings_are_unit_and_the_loss_is_the_batch_loss():
    with torch.no_grad():
        output = model()(**batch())
    assert output.video_embeds.norm(dim=1) == pytest.approx(torch.ones(3))
    assert output.text_embeds.norm(dim=1) == pytest.approx(torch.ones(3))
    logits = output.video_embeds @ output.text_embeds.T / 0.07
    own = torch.arange(3)
    expected = (torch.nn.functional.cross_entropy(logits, own) + torch.nn.functional.cross_entropy(logits.T, own)) / 2
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def siglip(**options):
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(**SMALL, image_size=32, patch_size=16)
    made = EgoVideo(
        transformers.SiglipVisionModel(config), towers()[1], slow_frames=2, fast_frames=4, embed_dim=16, **options
    )
    with torch.no_grad():
        for layer in made.vision.model.encoder.layers:
            layer.motion_adapter.up.weight.normal_(std=0.1)
    return made


def adapters_with_gradient(made):
    found = gradients(made)
    return {name.split(".")[4] for name, g in found.items() if "motion_adapter" in name and g.abs().sum() > 0}


def test_every_adapter_that_the_output_sees_gets_a_gradient():
    assert adapters_with_gradient(siglip()) == {"0", "1"}
    # CLIP's output is the class token, which no adapter touches: what the last one adds is seen by nobody.
    assert adapters_with_gradient(model()) == {"0"}


def test_detached_trains_the_last_adapter_at_most_as_upstream():
    assert adapters_with_gradient(siglip(fast_grad="detached")) == {"1"}
    assert adapters_with_gradient(model(fast_grad="detached")) == set()


def test_blocks_learn_from_the_slow_path_only():
    """With the slow path's part cut out of the fusion no gradient is left for the blocks, although it passes through them."""
    made = model()
    with torch.no_grad():
        made.fusion.weight[:, :16] = 0
    found = gradients(made)
    blocks = [name for name in found if name.startswith("vision.model.encoder.layers") and "motion_adapter" not in name]
    assert all(found[name].abs().sum() == 0 for name in blocks)
    embedding = found["vision.model.embeddings.patch_embedding.weight"]
    assert embedding.abs().sum() > 0  # the patch embedding is trained in both


def test_through_and_detached_give_the_same_embeddings():
    a, b = model(), model(fast_grad="detached")
    assert torch.equal(a(**batch()).video_embeds, b(**batch()).video_embeds)


@pytest.mark.parametrize(
    "options", [{}, {"fast_grad": "detached"}, {"fast_attention": "frame"}, {"variant": "spatiotemporal"}]
)
def test_checkpointing_changes_no_gradient(options):
    plain = gradients(model(**options).train())
    made = model(**options).train()
    made.gradient_checkpointing_enable()
    checked = gradients(made)
    assert plain.keys() == checked.keys()
    for name, gradient in plain.items():
        assert torch.allclose(gradient, checked[name], atol=1e-5), name


def test_stages_train_their_groups_and_nothing_else():
    made = model()
    for stage, groups in STAGES.items():
        names = made.set_stage(stage)
        assert names == sorted(n for n, p in made.named_parameters() if p.requires_grad)
        listed = made.parameter_groups()
        assert set(names) == {name for group in groups for name in listed[group]}
    assert not made.logit_scale.requires_grad
    made.set_stage("adapt")
    assert {name.split(".")[0] for name in gradients(made)} >= {"fusion", "fast_projection"}
    assert made.vision.model.embeddings.class_embedding.grad is not None
    assert made.text.model.embeddings.token_embedding.weight.grad is None
    every = sorted(n for name, group in made.parameter_groups().items() if name != "class_token" for n in group)
    assert every == sorted(n for n, _ in made.named_parameters())


def test_slow_path_alone():
    made = EgoVideo(*towers(), slow_frames=2, fast_frames=0, embed_dim=16)
    assert made(slow=batch()["slow"]).video_embeds.shape == (3, 16)
    with pytest.raises(ValueError, match="built with fast_frames=0"):
        made.set_stage("joint")


def test_what_is_missing_is_named():
    inputs = batch()
    with pytest.raises(ValueError, match="fast is None, but this model fuses 2 with 4 frames"):
        model()(slow=inputs["slow"])
    with pytest.raises(ValueError, match="needs nouns and verbs"):
        model(loss="egonce")(**inputs)
    assert model()(input_ids=inputs["input_ids"]).loss is None
    with pytest.raises(TypeError, match="text must be a transformers text encoder, got Linear"):
        EgoVideo(towers()[0], torch.nn.Linear(2, 2))


def test_mean_pooling_ignores_padding():
    bert = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=99))
    made = EgoVideo(towers()[0], bert.eval(), slow_frames=2, fast_frames=0, embed_dim=16).eval()
    short = torch.tensor([[5, 6, 7]])
    padded = torch.tensor([[5, 6, 7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    a = made.encode_text(short, torch.ones_like(short))
    assert torch.allclose(a, made.encode_text(padded, mask), atol=1e-5)


def test_save_and_load(tmp_path):
    made = model(loss="max_margin")
    made.set_stage("adapt")
    made.save_pretrained(tmp_path / "model")
    again = EgoVideo.from_pretrained(tmp_path / "model")
    assert again.stage == "adapt"
    assert again.loss == "max_margin"
    inputs = batch()
    assert torch.equal(made.eval()(**inputs).video_embeds, again.eval()(**inputs).video_embeds)
    with pytest.raises(FileNotFoundError, match="save_pretrained is needed"):
        EgoVideo.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    config["vision"]["class"] = "os"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="'os', which is no model"):
        EgoVideo.from_pretrained(tmp_path / "model")


def test_timm_vision(tmp_path):
    pytest.importorskip("timm")
    made = EgoVideo.from_timm(
        "vit_tiny_patch16_224",
        towers()[1],
        timm_options={"img_size": 32, "depth": 2},
        slow_frames=2,
        fast_frames=4,
        embed_dim=16,
    ).eval()
    made.save_pretrained(tmp_path)
    assert torch.equal(EgoVideo.from_pretrained(tmp_path).eval()(**batch()).video_embeds, made(**batch()).video_embeds)


def test_from_clip():
    config = transformers.CLIPConfig(
        text_config={**SMALL, "vocab_size": 99, "eos_token_id": 98},
        vision_config={**SMALL, "image_size": 32, "patch_size": 16},
    )
    made = EgoVideo.from_clip(transformers.CLIPModel(config), slow_frames=2, fast_frames=4, embed_dim=16)
    assert made(**batch()).loss.isfinite()


def test_bfloat16_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model())
    assert all(gradient.isfinite().all() for gradient in found.values())


def work(rank, port, queue):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    wrapped = DistributedDataParallel(model())
    inputs = {name: part.split((3, 1))[rank] for name, part in batch(4).items()}
    wrapped(**inputs).loss.backward()
    queue.put((rank, {name: p.grad.numpy() for name, p in wrapped.module.named_parameters() if p.grad is not None}))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_with_uneven_shards_equal_one_process():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, port, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = [queue.get()[1] for _ in ranks]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    alone = gradients(model(), **batch(4))
    for result in results:
        assert result.keys() == alone.keys()
        for name, gradient in alone.items():
            assert np.allclose(result[name], gradient.numpy(), atol=2e-5), name


# The Trainer


class Letters:
    """A tokenizer as far as the collator can tell."""

    def __call__(self, texts, padding, truncation, max_length, return_tensors):
        rows = [[*[1 + ord(c) % 90 for c in text][: max_length - 1], 98] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    rng = np.random.default_rng(0)
    paths = []
    for i in range(4):
        path = folder / f"{i}.mp4"
        write_video(path, rng.integers(0, 255, (20, 48, 64, 3), dtype=np.uint8), rate=10)
        paths.append(str(path))
    return paths


def test_items_and_mirrors(videos):
    from egovideo.training import ClipDataset

    record = {"video": videos[0], "caption": ["moves the left hand"], "start": 0.5, "end": 1.5}
    still = ClipDataset([record], rates=(2, 4), size=32, train=False)[0]
    assert still["slow"].shape == (2, 3, 32, 32)
    assert still["fast"].shape == (4, 3, 32, 32)
    assert still["caption"] == "moves the left hand"
    torch.manual_seed(0)
    captions = {ClipDataset([record], rates=(2, 4), size=32)[0]["caption"] for _ in range(20)}
    assert captions == {"moves the left hand", "moves the right hand"}
    torch.manual_seed(0)
    never = ClipDataset([record], rates=(2, 4), size=32, flip="none")
    assert {never[0]["caption"] for _ in range(20)} == {"moves the left hand"}
    with pytest.raises(ValueError, match="record 0 must have a video and a caption"):
        ClipDataset([{"video": "x.mp4"}])
    with pytest.raises(ValueError, match="rates must hold"):
        ClipDataset([record], rates=(1, 2, 3))


def test_unreadable_videos_are_raised_or_skipped_and_counted(videos, tmp_path):
    from egovideo.training import ClipCollator, ClipDataset

    records = [{"video": str(tmp_path / "no.mp4"), "caption": "a"}, {"video": videos[0], "caption": "b"}]
    with pytest.raises(MediaError, match="no such file"):
        ClipDataset(records, rates=(2,), size=32)[0]
    dataset = ClipDataset(records, rates=(2,), size=32, on_error="skip")
    batch = ClipCollator(Letters())([dataset[0], dataset[1]])
    assert batch["slow"].shape[0] == 1
    assert dataset.skipped == 1
    with pytest.raises(MediaError, match="none of its 1 clips"):
        ClipCollator(Letters())([dataset[0]])


def test_hard_negatives_are_clips_of_the_same_video(videos):
    from egovideo.training import ClipCollator, ClipDataset, HardNegatives

    records = [
        {"video": videos[0], "caption": "a", "start": 0.0, "end": 0.5, "nouns": [0], "verbs": [1]},
        {"video": videos[0], "caption": "b", "start": 1.0, "end": 1.5, "nouns": [1], "verbs": [0]},
        {"video": videos[1], "caption": "c", "start": 1.0, "end": 1.5, "nouns": [1], "verbs": [1]},
    ]
    dataset = HardNegatives(ClipDataset(records, rates=(2, 4), size=32, train=False))
    assert dataset.neighbours == [[1], [0], []]
    batch = ClipCollator(Letters(), num_nouns=2, num_verbs=2)([dataset[0], dataset[2]])
    assert batch["nouns"].tolist() == [[1, 0], [0, 1], [0, 1]]
    made = model(loss="egonce")
    assert made(**batch).loss.isfinite()


def test_the_trainer_trains_evaluates_saves_and_resumes(videos, tmp_path):
    from egovideo.training import ClipCollator, ClipDataset, EgoVideoConfig, EgoVideoTrainer

    records = [{"video": path, "caption": f"clip {i}"} for i, path in enumerate(videos)]
    config = EgoVideoConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        max_steps=2,
        save_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        stage="adapt",
        learning_rate=1e-2,
        gradient_checkpointing=True,
        seed=0,
    )
    assert (config.weight_decay, config.max_grad_norm, str(config.lr_scheduler_type.value)) == (0.01, 0, "constant")
    made = model()
    before = {name: p.clone() for name, p in made.named_parameters()}
    trainer = EgoVideoTrainer(
        made,
        config,
        train_dataset=ClipDataset(records, rates=(2, 4), size=32),
        eval_dataset=ClipDataset(records, rates=(2, 4), size=32, train=False),
        data_collator=ClipCollator(Letters()),
    )
    trainer.train()
    changed = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(made.get_parameter(name).requires_grad for name in changed)
    metrics = trainer.evaluate()
    assert 0 < metrics["eval_mAP_avg"] <= 1
    again = EgoVideo.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(again.fusion.weight, made.fusion.weight)
    config.max_steps = 3
    EgoVideoTrainer(
        model(),
        config,
        train_dataset=ClipDataset(records, rates=(2, 4), size=32),
        data_collator=ClipCollator(Letters()),
    ).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
