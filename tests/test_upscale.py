"""The command that people judge the project by: scripts/upscale.py and the batch behind it."""

import contextlib
import errno
import io
import json
import os
import pty
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_pictures
import torch
import torture
from PIL import Image

import sr
import sr.batch.run
from sr.batch import Batch
from sr.batch.inputs import Job
from sr.batch.reports import Report
from sr.errors import SRError, run_script
from sr.image import atomic
from sr.network import SRNetwork

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "upscale.py"


class Nearest(SRNetwork):
    """Repeats each pixel, so that every value of a result is known."""

    receptive_field = 0

    def __init__(self, *, scale: int = 2, in_channels: int = 3) -> None:
        super().__init__(scale=scale, in_channels=in_channels)

    def upscale(self, lq):
        return lq.repeat_interleave(self.scale, -2).repeat_interleave(self.scale, -1)


class Result(SimpleNamespace):
    status: int
    out: str
    err: str


@pytest.fixture
def upscale(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a fresh folder, with a network that repeats pixels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sr, "load", lambda name: Nearest())
    script = runpy.run_path(str(SCRIPT))

    def run(*args: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_script(lambda: script["main"](script["parse"]([str(a) for a in args])))
        captured = capsys.readouterr()
        return Result(status=end.value.code, out=captured.out, err=captured.err)

    return run


def save(name: str, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> np.ndarray:
    """A picture of noise, written as ``name``; gives its pixels."""
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
    shape = (size[1], size[0], channels) if channels > 1 else (size[1], size[0])
    pixels = np.random.default_rng(sum(os.fsencode(name))).integers(0, 256, shape, dtype=np.uint8)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(name)
    return pixels


def pixels_of(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def twice(pixels: np.ndarray) -> np.ndarray:
    return pixels.repeat(2, 0).repeat(2, 1)


def files(root: str | Path = ".") -> list[str]:
    """Every file under a folder, hidden ones too."""
    return sorted(p.relative_to(root).as_posix() for p in Path(root).rglob("*") if p.is_file())


def test_a_picture_comes_out_beside_its_input(upscale):
    pixels = save("a.png")
    result = upscale("a.png")
    assert result.status == 0 and result.err == ""
    assert result.out.startswith("a.png -> a_x2.png  7x5 -> 14x10  ") and result.out.count("\n") == 1
    assert np.array_equal(pixels_of("a_x2.png"), twice(pixels))
    assert files() == ["a.png", "a_x2.png"]


def test_the_spelling_of_realesrgan(upscale):
    pixels = save("inputs/a.png", (20, 9))
    result = upscale("-i", "inputs", "-o", "results", "-n", "model", "-s", "4", "-t", "8", "--fp32")
    assert result.status == 0, result.err
    assert np.array_equal(pixels_of("results/a.png"), twice(twice(pixels)))


@pytest.mark.parametrize(
    ("args", "name", "size"),
    [
        (["-s", "1.5"], "a_x1.5.png", (11, 8)),  # 10.5 and 7.5, halves up
        (["-s", "3.5", "-m", "known"], "a_x3.5.png", (25, 18)),
        (["-s", "1"], "a_x1.png", (7, 5)),
        (["--size", "30x11"], "a_30x11.png", (30, 11)),
        (["--suffix", "big", "--ext", "webp"], "abig.webp", (14, 10)),
    ],
)
def test_any_size_of_output(upscale, args, name, size):
    save("a.png")
    assert upscale("a.png", *args).status == 0
    with Image.open(name) as image:
        assert image.size == size


def test_a_folder_with_a_bad_file(upscale):
    good = {name: save(f"in/{name}") for name in ("a.png", "c.png", "sub/d.png")}
    Path("in/b.png").write_text("hello")
    Path("in/b2.png").write_bytes(Path("in/c.png").read_bytes()[:60])
    result = upscale("in", "-o", "out", "-r", "--json", "--manifest", "log.jsonl")
    assert result.status == 1
    lines = result.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("failed: in/b.png: in/b.png is not a picture")
    assert lines[1].startswith("failed: in/b2.png: in/b2.png is damaged or incomplete")
    assert lines[2].startswith("3 done, 2 failed in ") and lines[2].endswith("megapixels/s out")
    assert files("out") == ["a.png", "c.png", "sub/d.png"]
    for name, pixels in good.items():
        assert np.array_equal(pixels_of(f"out/{name}"), twice(pixels))
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()] == records
    by_input = {record["input"]: record for record in records}
    done = by_input["in/sub/d.png"]
    assert (done["status"], done["output"], done["input_size"], done["output_size"], done["model"]) == (
        "done",
        "out/sub/d.png",
        [7, 5],
        [14, 10],
        "sparsesr_t_x2.quickstart",
    )
    assert done["seconds"] >= 0 and done["finished"][:2] == "20"
    assert by_input["in/b.png"]["status"] == "failed" and "not a picture" in by_input["in/b.png"]["error"]


def test_results_are_replaced_or_kept_and_the_manifest_grows(upscale):
    pixels = save("in/a.png")
    save("in/b.png")
    Path("out").mkdir()
    Path("out/a.png").write_text("an earlier one")
    Path("log.jsonl").write_text('{"unfinished')  # of a killed run
    result = upscale("in", "-o", "out", "--skip-existing", "--manifest", "log.jsonl")
    assert result.status == 0 and result.err.startswith("1 done, 1 skipped in ")
    assert Path("out/a.png").read_text() == "an earlier one"
    log = Path("log.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in log[1:]] == ["skipped", "done"]
    assert upscale("in", "-o", "out").status == 0
    assert np.array_equal(pixels_of("out/a.png"), twice(pixels))


def test_an_input_is_replaced_on_demand(upscale):
    pixels = save("a.png")
    assert upscale("a.png", "-o", "a.png").status == 2
    assert upscale("a.png", "-o", "a.png", "--overwrite").status == 0
    assert np.array_equal(pixels_of("a.png"), twice(pixels))


def test_shards_share_the_work(upscale):
    for i in range(5):
        save(f"in/{i}.png")
    assert upscale("in", "-o", "out", "--shard", "1/2").status == 0
    assert files("out") == ["0.png", "2.png", "4.png"]
    assert upscale("in", "-o", "out", "--shard", "2/2", "--skip-existing").status == 0
    assert files("out") == [f"{i}.png" for i in range(5)]


def test_tiles_are_compared_with_the_whole(upscale):
    save("a.png", (150, 70))
    result = upscale("a.png", "-t", "64", "--check-tiles", "--json")
    assert json.loads(result.out)["tile_difference"] == 0
    assert "tiles differ by at most 0.0000/255" in upscale("a.png", "-t", "64", "--check-tiles").out


def test_a_moving_gif_stays_one(upscale):
    frames = [Image.fromarray(np.full((4, 6), value, np.uint8)) for value in (0, 80, 255)]
    frames[0].save("a.gif", save_all=True, append_images=frames[1:], duration=[40, 90, 200], loop=3)
    result = upscale("a.gif")
    assert result.status == 0 and "3 frames" in result.out
    with Image.open("a_x2.gif") as image:
        assert (image.size, image.n_frames, image.info["loop"]) == ((12, 8), 3, 3)
        seen = []
        for i in range(3):
            image.seek(i)
            seen.append((image.info["duration"], image.convert("L").getpixel((5, 5))))
    assert seen == [(40, 0), (90, 80), (200, 255)]


@pytest.mark.parametrize("ext", ["jpg", "webp"])
def test_what_the_format_cannot_hold_fails_before_it_is_computed(upscale, monkeypatch, ext):
    save("in/long.png", (40_000, 1))
    save("in/short.png")
    monkeypatch.setattr(Nearest, "upscale", lambda self, lq: pytest.fail("computed") if lq.shape[-1] > 99 else lq)
    monkeypatch.setattr(Nearest, "__init__", lambda self: SRNetwork.__init__(self, scale=1))
    result = upscale("in", "-o", "out", "--ext", ext, "-s", "1" if ext == "webp" else "2")
    assert result.status == 1
    assert "failed: in/long.png" in result.err and ("65,5" in result.err or "16,383" in result.err)
    assert files("out") == [f"short.{ext}"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.png", "-s", "0"], "0"),
        (["a.png", "-s", "-1"], "-1"),
        (["a.png", "-s", "1000", "-m", "x"], "1000"),
        (["a.png", "-s", "nan", "-m", "x"], "nan"),
        (["a.png", "-s", "7"], "no installed weights enlarge 7 times"),
        (["a.png", "--size", "0x5"], "size"),
        (["a.png", "--size", "4x4", "-s", "2"], "leave one out"),
        (["a.png", "--quality", "101"], "--quality lies in 1 to 100"),
        (["a.png", "--ext", "xyz"], "'xyz'"),
        (["a.png", "-t", "-3"], "at least 1 pixel"),
        (["a.png", "--device", "abacus"], "abacus"),
        (["a.png", "--dtype", "fp16", "--device", "cpu"], "float16 needs a GPU"),
        (["a.png", "--sparsity", "0.5"], "no sparsity"),
        (["a.png", "-o", "a.png"], "is the input as well"),
        (["a.png", "-o", "file/x"], "is a file, not a folder"),
        (["a.png", "-o", "out.xyz"], "suffix '.xyz'"),
        (["a.png", "--skip-existing", "--overwrite"], "leave one out"),
        (["a.png", "--shard", "3/2"], "--shard"),
        (["a.png", "--manifest", "gone/log.jsonl"], "cannot write the manifest gone/log.jsonl"),
        (["a.png", "-o", "-", "--json"], "--json"),
        (["gone.png"], "gone.png does not exist"),
    ],
)
def test_mistakes_in_the_command_take_one_line_and_leave_nothing(upscale, args, message):
    save("a.png")
    Path("file").write_text("")
    result = upscale(*args)
    assert result.status == 2 and result.out == ""
    assert result.err.startswith("error: ") and message in result.err and result.err.count("\n") == 1
    assert files() == ["a.png", "file"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "gone.safetensors"], "no weights file at gone.safetensors"),
        (["-m", "sparsesr_t_x9"], "'sparsesr_t_x9' is neither a file nor the name of known weights"),
        (["-m", "grey.safetensors"], "for RGB, not one of 1 channels"),
    ],
)
def test_models_that_do_not_do(upscale, monkeypatch, args, message):
    save("a.png")
    monkeypatch.setattr(sr, "load", sr.checkpoint.load)
    if "grey" in args[1]:
        monkeypatch.setattr(sr, "load", lambda name: Nearest(in_channels=1))
    result = upscale("a.png", *args)
    assert result.status == 2 and message in result.err and result.err.count("\n") == 1
    assert files() == ["a.png"]


def test_a_full_disk_ends_the_batch(upscale, monkeypatch):
    for i in range(30):
        save(f"in/{i:02d}.png")

    def full(picture, target, *args):
        if Path(target).name != "00.png":
            raise SRError(f"cannot write {target}") from OSError(errno.ENOSPC, "No space left on device")
        target.write_bytes(b"")

    monkeypatch.setattr(sr.batch.run, "write_picture", full)
    result = upscale("in", "-o", "out")
    assert result.status == 1
    assert "failed: in/01.png: cannot write out/01.png" in result.err
    assert "not begun, since the disk is full" in result.err.splitlines()[-1]
    assert files("out") == ["00.png"]


def test_a_bug_in_one_picture_does_not_end_the_batch(upscale, monkeypatch):
    for name in ("a", "b", "c"):
        save(f"in/{name}.png", (3, 3) if name == "b" else (7, 5))
    plain = Nearest.upscale
    monkeypatch.setattr(Nearest, "upscale", lambda self, lq: plain(self, lq / (lq.shape[-1] != 3 or 0 // 0)))
    result = upscale("in", "-o", "out")
    assert result.status == 1
    assert "failed: in/b.png: ZeroDivisionError: " in result.err
    assert files("out") == ["a.png", "c.png"]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Pictures in memory, from the moment they are read until they are written, stay within the budget."""
    monkeypatch.chdir(tmp_path)
    sizes = [(10, 10), (20, 10), (40, 40), (10, 10), (10, 20), (30, 10), (10, 10), (40, 30), (5, 5)]
    for i, size in enumerate(sizes):
        save(f"{i}.png", size)
    alive: list[int] = []
    seen: list[tuple[int, int]] = []
    read, write = sr.batch.run.read_picture, sr.batch.run.write_picture

    def counted_read(source):
        picture = read(source)
        alive.append(4 * picture.info.width * picture.info.height)
        seen.append((sum(alive), len(alive)))
        return picture

    def slow_write(picture, *args):
        time.sleep(0.01)
        write(picture, *args)
        alive.remove(4 * picture.info.width * picture.info.height)

    monkeypatch.setattr(sr.batch.run, "read_picture", counted_read)
    monkeypatch.setattr(sr.batch.run, "write_picture", slow_write)
    monkeypatch.setattr(sr.batch.run, "_IN_FLIGHT", 2500)
    jobs = [Job(Path(f"{i}.png"), Path(f"out/{i}.png")) for i in range(len(sizes))]
    records = list(Batch(sr.Upscaler(Nearest(), device="cpu"), "nearest").run(jobs))
    assert [record.error for record in records] == [None] * len(sizes)
    assert all(pixels <= 2500 or count == 1 for pixels, count in seen)
    assert max(count for _, count in seen) > 1  # it does overlap


@pytest.mark.parametrize(("mode", "ext"), [("RGB", "png"), ("L", "png"), ("RGBA", "tif"), ("LA", "png")])
def test_rows_give_what_the_whole_picture_gives(upscale, monkeypatch, mode, ext):
    save("in/a.png", (150, 300), mode)
    assert upscale("in", "-o", "whole", "--ext", ext, "-t", "64", "-s", "1.7").status == 0
    monkeypatch.setattr(sr.batch.run, "needs_rows", lambda info, width, height: True)
    monkeypatch.setattr(sr.batch.run, "read_picture", lambda source: pytest.fail("read whole"))
    result = upscale("in", "-o", "rows", "--ext", ext, "-t", "64", "-s", "1.7")
    assert result.status == 0, result.err
    assert np.array_equal(pixels_of(f"rows/a.{ext}"), pixels_of(f"whole/a.{ext}"))
    assert files("rows") == [f"a.{ext}"]


def test_a_large_picture_that_is_cut_short_leaves_nothing(upscale, monkeypatch):
    save("in/a.png", (150, 300))
    save("in/b.png")
    whole = Path("in/a.png").read_bytes()
    Path("in/a.png").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(sr.batch.run, "needs_rows", lambda info, width, height: width > 200)
    result = upscale("in", "-o", "out")
    assert result.status == 1 and "failed: in/a.png" in result.err
    assert files("out") == ["b.png"]


def test_a_broken_picture_in_a_pipe(upscale, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    result = upscale("-")
    assert (result.status, result.out) == (1, "") and "failed: -: " in result.err and "not a picture" in result.err


def test_bars_on_a_terminal(upscale, monkeypatch):
    for name in ("a", "b"):
        save(f"in/{name}.png", (90, 80))
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        result = upscale("in", "-o", "out", "-t", "64")
        os.set_blocking(ours, False)
        shown = ""
        with contextlib.suppress(BlockingIOError):
            while True:
                shown += os.read(ours, 4096).decode(errors="replace")
    os.close(ours)
    assert result.status == 0
    assert "pictures" in shown and "tiles" in shown and "2 done in " in shown
    assert result.out.count(" -> out/") == 2 and "pictures" not in result.out


def test_a_report_needs_no_streams(monkeypatch):
    """As under pythonw, or with both closed."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with Report(2) as report:
        report.add(sr.batch.run.Record("a", "b", "failed", "m", error="no"))
        assert report.close() == 1


def test_a_batch_runs_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = save("a.png")
    (record,) = Batch(sr.Upscaler(Nearest(), device="cpu"), "mine").run([Job(Path("a.png"), Path("deep/er/a.png"))])
    assert (record.status, record.model, record.output_size) == ("done", "mine", (14, 10))
    assert np.array_equal(pixels_of("deep/er/a.png"), twice(pixels))
    assert torch.is_inference_mode_enabled() is False


def test_every_kind_of_picture(upscale, tmp_path):
    """Size, depth, colours, timing and metadata of each torture file's result, read without the project's code."""
    (tmp_path / "in").mkdir()
    cases = torture.make(tmp_path / "in")
    lossy = [case.name for case in cases if case.suffix in (".jpg", ".avif")]  # become PNG, as rgb.png is already
    other = [case.name for case in cases if case.name not in lossy]
    outputs = {}
    for names in (lossy, other):
        result = upscale(*(f"in/{name}" for name in names), "-o", f"out{len(outputs)}", "--json")
        assert result.status == 0, result.err
        records = [json.loads(line) for line in result.out.splitlines()]
        outputs |= {Path(record["input"]).name: Path(record["output"]) for record in records}
    assert len(outputs) == len(cases) >= 40
    for case in cases:
        assert outputs[case.name].suffix == (".png" if case.name in lossy else case.suffix)
        data = outputs[case.name].read_bytes()
        frames = test_pictures.frames_of(data, case)
        assert len(frames) == case.frames, case.name
        assert frames[0].shape == (2 * case.height, 2 * case.width, case.channels), case.name
        assert frames[0].dtype.newbyteorder("=") == case.dtype, case.name
        first = test_pictures.in_unit(frames[0], case)
        if case.corners is not None:
            corners = first[[0, 0, -1, -1], [0, -1, 0, -1]]
            assert np.nanmax(np.abs(corners - case.corners)) <= case.tolerance, case.name
        test_pictures.check_metadata(data, case)


def test_a_name_that_is_no_text(upscale):
    name = os.fsdecode(b"\xff.png")
    try:
        save(name)
    except OSError:
        pytest.skip("this file system takes text only")
    result = upscale(name, "-o", "out", "--manifest", "log.jsonl")
    assert result.status == 0 and "\\udcff.png -> out/\\udcff.png" in result.out
    assert json.loads(Path("log.jsonl").read_text())["output"] == f"out/{name}"
    assert Path(f"out/{name}").is_file()


def test_what_a_killed_run_left_is_removed(upscale):
    save("in/a.png")
    with pytest.raises(KeyboardInterrupt), atomic(Path("a.png")):
        (left,) = Path().glob(".*.part")
        kept = left.read_bytes()
        raise KeyboardInterrupt
    Path("out").mkdir()
    (Path("out") / left.name).write_bytes(kept)
    other = Path("out/.0123456789abcdef.01234567.part")  # of another process, on another picture
    other.write_bytes(b"")
    assert upscale("in", "-o", "out").status == 0
    assert files("out") == [other.name, "a.png"]
