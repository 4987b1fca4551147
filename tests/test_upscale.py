"""The command that people judge the project by: scripts/upscale.py and the batch behind it."""

import contextlib
import json
import os
import pty
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torture
from independent_readers import check_metadata, frames_of, in_unit
from PIL import Image
from upscaling import Command, Nearest, files, pixels_of, save, twice

import sr
import sr.batch.run
from sr.batch import Batch
from sr.batch.inputs import Job
from sr.batch.reports import Report


@pytest.fixture
def upscale(tmp_path, monkeypatch, capsys):
    return Command(tmp_path, monkeypatch, capsys)


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


def test_a_note_tells_of_results_of_another_scale_that_are_kept(upscale):
    save("in/a.png", (7, 5))
    save("in/b.png", (7, 5))
    assert upscale("in/a.png", "-o", "out/", "-s", "3").status == 0
    assert upscale("in/b.png", "-o", "out/").status == 0
    assert (
        upscale("in", "-o", "out", "--skip-existing", "--size", "1000x1000").status == 0
    )  # too much for so small ones
    result = upscale("in", "-o", "out", "--skip-existing", "--json")
    assert result.status == 0
    assert result.err.splitlines()[0] == (
        "note: in/a.png: out/a.png is kept, though it is 21x15, not 14x10; remove it to redo it"
    )
    assert result.err.splitlines()[1].startswith("0 done, 2 skipped")
    assert [json.loads(line)["status"] for line in result.out.splitlines()] == ["skipped", "skipped"]


def test_names_that_begin_with_a_hyphen_follow_two(upscale):
    pixels = save("-a.png")
    assert upscale("-o", "out/", "--", "-a.png").status == 0
    assert np.array_equal(pixels_of("out/-a.png"), twice(pixels))


def test_a_name_takes_one_line(upscale):
    save("a\nb\x1b[31m.png")
    result = upscale("a\nb\x1b[31m.png")
    assert result.status == 0 and len(result.out.splitlines()) == 1
    assert result.out.startswith(r"a\nb\x1b[31m.png -> a\nb\x1b[31m_x2.png")


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
        frames = frames_of(data, case)
        assert len(frames) == case.frames, case.name
        assert frames[0].shape == (2 * case.height, 2 * case.width, case.channels), case.name
        assert frames[0].dtype.newbyteorder("=") == case.dtype, case.name
        first = in_unit(frames[0], case)
        if case.corners is not None:
            corners = first[[0, 0, -1, -1], [0, -1, 0, -1]]
            assert np.nanmax(np.abs(corners - case.corners)) <= case.tolerance, case.name
        check_metadata(data, case)


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
