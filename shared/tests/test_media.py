"""Frames at their exact times, upright, and files that are broken in known ways."""

import io
import pickle
import struct
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")

from chapbook_shared.media import MediaError, Video, read_image, resize, write_video  # noqa: E402

LEVELS = 24  # frame i is grey of level 8 * i + 16: a frame's number can be read from its pixels


def numbered(count=LEVELS, height=48, width=64):
    for i in range(count):
        yield np.full((height, width, 3), 8 * (i % LEVELS) + 16, np.uint8)


def numbers(images):
    return np.round((images.mean(axis=(1, 2, 3)) - 16) / 8).astype(int).tolist()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def clip(folder):
    """24 frames at 12 a second, key frames at 0, 8 and 16, with B-frames."""
    path = folder / "clip.mp4"
    options = {"g": "8", "bf": "2", "crf": "8", "sc_threshold": "0"}
    write_video(path, numbered(), rate=12, options=options)
    return path


def test_every_frame_is_found_by_its_number_in_any_order(clip):
    with Video(clip) as video:
        assert len(video) == 24
        assert video.timestamps == pytest.approx(np.arange(24) / 12, abs=1e-6)
        order = [23, 0, 9, 9, 7, 16, 15]
        frames = video.read(order)
        assert numbers(frames.images) == order
        assert frames.indices.tolist() == order
        assert frames.times == pytest.approx(np.array(order) / 12, abs=1e-6)


def test_reading_single_frames_equals_reading_all_in_order(clip):
    with Video(clip) as video:
        everything = np.stack([image for _, image in video.frames()])
        for i in range(24):
            assert np.array_equal(video.read([i]).images[0], everything[i])


def test_skipping_frames_that_nothing_depends_on_changes_no_pixel(folder):
    rng = np.random.default_rng(0)
    path = folder / "noise.mp4"
    scene = rng.integers(0, 256, (64, 256, 3), dtype=np.uint8)
    moving = [np.ascontiguousarray(np.roll(scene, 3 * i, axis=1)[:, :96]) for i in range(40)]
    write_video(path, moving, options={"g": "250", "bf": "3", "b-pyramid": "normal"})
    with Video(path, threads=1) as video:
        everything = np.stack([image for _, image in video.frames()])
        for step in (2, 3, 7, 13):
            picked = list(range(1, 40, step))
            assert np.array_equal(video.read(picked).images, everything[picked])


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_a_variable_frame_rate_keeps_each_time_stamp(folder, ending):
    times = [0.0, 0.1, 0.15, 0.9, 0.95, 2.0, 2.01, 2.5]
    path = folder / f"vfr.{ending}"
    write_video(path, numbered(8), rate=100, times=times, options={"bf": "0"})
    with Video(path) as video:
        assert video.timestamps == pytest.approx(times, abs=1e-3)
        assert numbers(video.at([0.0, 0.14, 0.5, 0.949, 1.99, 2.005, 99.0]).images) == [0, 1, 2, 3, 4, 5, 7]
        window = video.window(0.15, 2.0)
        assert len(window) == 3
        assert numbers(video.read([0, 1, 2], window).images) == [2, 3, 4]


def test_a_window_of_an_unread_file_equals_a_cut_of_the_whole(clip):
    for start, end in [(0.0, 0.5), (0.7, 1.3), (8 / 12, 16 / 12), (1.9, None), (0.71, 0.74)]:
        with Video(clip) as fresh, Video(clip) as known:
            assert len(known) == 24
            a, b = fresh.window(start, end), known.window(start, end)
            assert a.pts == b.pts
            everything = range(len(a))
            assert np.array_equal(fresh.read(everything, a).images, known.read(everything, b).images)


def test_a_window_shorter_than_a_frame_is_the_frame_on_screen(clip):
    with Video(clip) as video:
        assert numbers(video.read([0], video.window(0.51, 0.52)).images) == [6]
        assert len(video.window(6 / 12, 7 / 12)) == 1  # half open: frame 7 belongs to the next window


@pytest.mark.parametrize(("start", "end"), [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (0.0, float("nan"))])
def test_an_interval_must_be_one(clip, start, end):
    with Video(clip) as video, pytest.raises(ValueError, match="start"):
        video.window(start, end)


def test_a_window_past_the_end_says_so(clip):
    with Video(clip) as video, pytest.raises(MediaError, match="shows nothing in"):
        video.window(50.0, 60.0)


def test_index_out_of_the_file(clip):
    with Video(clip) as video:
        with pytest.raises(IndexError, match="has 24 frames here; there is no frame 24"):
            video.read([0, 24])
        with pytest.raises(IndexError, match="no frame -1"):
            video.read([-1])


def test_no_frames_asked_no_frames_read(clip):
    with Video(clip) as video:
        assert len(video.read([])) == 0


def test_a_sound_track_that_begins_earlier_moves_the_origin(folder):
    path = folder / "late.mkv"
    with av.open(str(path), "w") as container:
        picture = container.add_stream("libx264", rate=10)
        picture.width, picture.height, picture.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("aac", rate=8000)
        for i in range(10):
            tone = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            tone.sample_rate, tone.pts = 8000, 1024 * i
            container.mux(sound.encode(tone))
        for i, image in enumerate(numbered(5)):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = i + 5, Fraction(1, 10)
            container.mux(picture.encode(frame))
        container.mux(picture.encode(None))
        container.mux(sound.encode(None))
    with Video(path) as video:
        # Matroska counts in milliseconds; AAC's priming may begin before zero.
        assert 0.5 <= video.timestamps[0] < 0.64
        assert np.diff(video.timestamps) == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(
    ("ending", "codec"), [("mkv", "libx264"), ("avi", "mpeg4"), ("ts", "libx264"), ("webm", "libvpx"), ("mov", "mpeg4")]
)
def test_containers(folder, ending, codec):
    path = folder / f"kind.{ending}"
    write_video(path, numbered(), rate=25, codec=codec, options={"g": "6"})
    with Video(path) as video:
        assert len(video) == 24
        assert np.diff(video.timestamps) == pytest.approx(1 / 25, abs=2e-3)
        assert numbers(video.read([20, 3, 11]).images) == [20, 3, 11]
        window = video.window(0.4, 0.8)
        assert numbers(video.read(range(len(window)), window).images) == list(range(10, 20))


def test_a_stream_without_times_is_counted(folder):
    path = folder / "raw.h264"
    write_video(path, numbered(), rate=25, options={"bf": "2", "g": "6"})
    with Video(path) as video:
        assert len(video) == 24
        assert numbers(video.read([20, 3, 11]).images) == [20, 3, 11]
        assert video.timestamps == pytest.approx(np.arange(24) / 25, abs=1e-6)
        window = video.window(0.4, 0.8)
        assert numbers(video.read(range(len(window)), window).images) == list(range(10, 20))


def test_gif(folder):
    path = folder / "loop.gif"
    stills = [Image.fromarray(image) for image in numbered(5)]
    stills[0].save(path, save_all=True, append_images=stills[1:], duration=[100, 200, 100, 300, 100], loop=0)
    with Video(path) as video:
        assert video.timestamps == pytest.approx([0, 0.1, 0.3, 0.4, 0.7], abs=0.011)
        assert numbers(video.read([4, 0, 2]).images) == [4, 0, 2]


@pytest.mark.parametrize(("turns", "matrix"), [(1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (3, (0, -1, 1, 0))])
def test_rotation_metadata_gives_upright_frames(folder, clip, turns, matrix):
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32] = (250, 30, 30)  # red, top left
    plain, turned = folder / "plain.mp4", folder / f"turned{turns}.mp4"
    write_video(plain, [picture] * 3)
    data = bytearray(plain.read_bytes())
    place = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value << 16 for value in matrix)
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    turned.write_bytes(data)
    with Video(turned) as video:
        frames = video.read([0])
        small = video.read([0], short_side=24).images[0]
    clockwise = np.rot90(picture, -turns)
    assert frames.images.shape[1:] == clockwise.shape
    assert np.abs(frames.images[0].astype(int) - clockwise).mean() < 12
    assert np.abs(small.astype(int) - resize(clockwise, short_side=24)).mean() < 20


@pytest.mark.parametrize("pix_fmt", ["gray", "yuv420p10le", "yuv444p"])
def test_grey_and_deep_pixels_become_rgb_bytes(folder, pix_fmt):
    path = folder / f"{pix_fmt}.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 33, 17, pix_fmt  # odd sides
        for image in numbered(4, 17, 33):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format=pix_fmt)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with Video(path) as video:
        frames = video.read([0, 3])
    assert frames.images.shape == (2, 17, 33, 3)
    assert frames.images.dtype == np.uint8
    assert numbers(frames.images) == [0, 3]


def test_sizes(clip):
    with Video(clip) as video:
        assert video.read([0], size=(20, 30)).images.shape == (1, 20, 30, 3)
        assert video.read([0], short_side=24).images.shape == (1, 24, 32, 3)
        with pytest.raises(ValueError, match="size or short_side, not both"):
            video.read([0], size=(20, 30), short_side=24)
        with pytest.raises(ValueError, match="short_side must be >= 1"):
            video.read([0], short_side=0)
        with pytest.raises(ValueError, match="more than max_bytes=1000"):
            video.read([0], max_bytes=1000)


def test_memory_is_that_of_the_frames_asked_for(folder):
    path = folder / "long.mp4"
    write_video(path, numbered(300, 240, 320), options={"g": "50", "preset": "ultrafast"})
    one = 240 * 320 * 3
    with Video(path, threads=1) as video:
        tracemalloc.start()
        video.read([0, 100, 299])
        for _ in video.frames():
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 12 * one  # 300 would be all of them


# Broken files


def test_missing_file(folder):
    with pytest.raises(MediaError, match=r"absent\.mp4: no such file") as caught:
        Video(folder / "absent.mp4")
    assert caught.value.reason == "no such file"


@pytest.mark.parametrize("content", [b"", b"no video at all" * 100, bytes(5000)])
def test_not_a_video(folder, content):
    path = folder / "junk.mp4"
    path.write_bytes(content)
    with pytest.raises(MediaError, match=r"junk\.mp4: "):
        len(Video(path))


def test_sound_only(folder):
    path = folder / "sound.mp4"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=8000)
        tone = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        tone.sample_rate = 8000
        container.mux(sound.encode(tone))
        container.mux(sound.encode(None))
    with pytest.raises(MediaError, match="no video stream that can be decoded, only audio"):
        Video(path)


def test_a_file_cut_before_its_table_of_contents_cannot_be_opened(folder):
    path = folder / "tail_cut.mp4"
    with av.open(str(path), "w") as container:  # the table comes last here
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for image in numbered():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(MediaError, match=r"not a readable video .*: cut off|no video stream that can be decoded"):
        len(Video(path))


def test_a_cut_file_gives_what_is_there_and_says_how_much_is_missing(folder):
    path = folder / "cut.mp4"
    noise = np.random.default_rng(0).integers(0, 255, (24, 48, 64, 3), dtype=np.uint8)
    write_video(path, noise, rate=12, options={"g": "4"})
    with Video(path) as video:
        whole = video.read(range(24)).images
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with Video(path) as video:
        assert video.info.frames == 24
        there = len(video)
        assert 8 <= there <= 14
        assert video.missing == 24 - there
        with pytest.raises(IndexError, match="of the 24 that it declares: it is cut off"):
            video.read([23])
        assert np.array_equal(video.read(range(there)).images, whole[:there])  # all that is counted can be read


def test_corrupt_frames_are_named_and_the_others_kept(folder):
    rng = np.random.default_rng(0)
    path = folder / "corrupt.mp4"
    noise = rng.integers(0, 255, (24, 48, 64, 3), dtype=np.uint8)
    write_video(path, noise, codec="mpeg4", rate=10, options={"g": "4"})
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = rng.bytes(40)
    path.write_bytes(data)
    with Video(path) as video:
        with pytest.raises(
            MediaError, match=r"of 24 frames cannot be decoded \(corrupt or cut off\), the first at 0\.5"
        ) as caught:
            video.read(range(24))
        kept = caught.value.frames
        assert 19 <= len(kept) < 24
        assert kept.indices[0] == 0
        assert kept.indices[-1] == 23
        skipped = video.read(range(24), on_error="skip")
        assert np.array_equal(skipped.images, kept.images)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.reason, len(again.frames)) == (caught.value.reason, len(kept))


# Images


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_images_of_every_mode_become_rgb(folder):
    grey = np.arange(0, 240, 20, dtype=np.uint8).reshape(3, 4)
    rgb = np.repeat(grey[..., None], 3, -1)
    for source in (
        Image.fromarray(grey),
        Image.fromarray(rgb),
        Image.fromarray(rgb).convert("RGBA"),
        Image.fromarray(grey.astype(np.uint16) << 8),
        Image.fromarray(grey).convert("P"),
    ):
        assert np.array_equal(read_image(encoded(source, "PNG")), rgb), source.mode
    path = folder / "ümläut.png"
    Image.fromarray(rgb).save(path)
    assert np.array_equal(read_image(path), rgb)
    assert read_image(path, short_side=6).shape == (6, 8, 3)


def test_transparent_becomes_white():
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert (read_image(encoded(clear, "PNG")) == 255).all()


def test_exif_rotation_is_applied():
    image = Image.fromarray(np.zeros((2, 4, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(encoded(image, "JPEG", exif=exif)).shape == (4, 2, 3)


def test_broken_images(folder):
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)), "PNG")
    with pytest.raises(MediaError, match="not a readable image"):
        read_image(whole[: len(whole) // 2])
    with pytest.raises(MediaError, match="not a readable image"):
        read_image(b"")
    with pytest.raises(MediaError, match="no such file"):
        read_image(folder / "absent.png")


def test_resize_refuses_what_is_no_image():
    with pytest.raises(ValueError, match="images must be uint8"):
        resize(np.zeros((4, 4, 3)), short_side=2)
    with pytest.raises(ValueError, match="images must be uint8"):
        resize(np.zeros((4, 4), np.uint8), short_side=2)


def test_resizing_to_the_same_size_is_a_copy():
    images = np.random.default_rng(0).integers(0, 255, (2, 5, 7, 3), dtype=np.uint8)
    same = resize(images, size=(5, 7))
    assert np.array_equal(same, images)
    assert not np.shares_memory(same, images)
    assert resize(images, short_side=10).shape == (2, 10, 14, 3)


# Writing


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        ([], {}, "at least one image"),
        ([np.zeros((4, 4, 3))], {}, "images must be uint8"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((8, 4, 3), np.uint8)], {}, "image 1 is"),
        ([np.zeros((4, 4, 3), np.uint8)] * 2, {"times": [0.0]}, "times has 1 entries"),
        ([np.zeros((4, 4, 3), np.uint8)] * 2, {"times": [1.0, 0.5]}, "times must ascend"),
        ([np.zeros((4, 4, 3), np.uint8)], {"rate": 0}, "rate must be positive"),
    ],
)
def test_writing_refuses(folder, images, options, message):
    with pytest.raises(ValueError, match=message):
        write_video(folder / "refused.mkv", images, codec="ffv1", **options)
