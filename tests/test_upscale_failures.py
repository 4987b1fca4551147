"""What scripts/upscale.py says to mistakes, bad files and full disks, and that it leaves nothing half-written."""

import errno
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from upscaling import Command, Nearest, files, pixels_of, save, twice

import sr
import sr.batch.run
from sr.atomic import atomic
from sr.errors import SRError
from sr.network import SRNetwork
from sr.weights import default_weights


@pytest.fixture
def upscale(tmp_path, monkeypatch, capsys):
    return Command(tmp_path, monkeypatch, capsys)


def test_a_folder_with_a_bad_file(upscale):
    good = {name: save(f"in/{name}") for name in ("a.png", "c.png", "sub/d.png")}
    Path("in/b.png").write_text("hello")
    Path("in/b2.png").write_bytes(Path("in/c.png").read_bytes()[:60])
    result = upscale("in", "-o", "out", "-r", "--json", "--manifest", "log.jsonl")
    assert result.status == 1
    lines = result.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("failed: in/b.png: is not a picture")
    assert lines[1].startswith("failed: in/b2.png: is damaged or incomplete")
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
        default_weights().name,
    )
    assert done["seconds"] >= 0 and done["finished"][:2] == "20"
    assert by_input["in/b.png"]["status"] == "failed" and "not a picture" in by_input["in/b.png"]["error"]


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
        (["a.png", "-s", "65"], "at most 64 times"),
        (["a.png", "--size", "0x5"], "size"),
        (["a.png", "--size", "4x4", "-s", "2"], "leave one out"),
        (["a.png", "--quality", "101"], "--quality lies in 1 to 100"),
        (["a.png", "--ext", "xyz"], "'xyz'"),
        (["a.png", "--device", "abacus"], "abacus"),
        (["a.png", "--dtype", "fp16", "--device", "cpu"], "float16 needs a GPU"),
        (["a.png", "--sparsity", "0.5"], "no sparsity"),
        (["a.png", "-o", "a.png"], "is the input as well"),
        (["a.png", "-o", "file/x"], "is a file, not a folder"),
        (["a.png", "-o", "out.xyz"], "suffix '.xyz'"),
        (["a.png", "-o", "out.jpg", "--ext", "webp"], "out.jpg says another format than .webp"),
        (["a.png", "--skip-existing", "--overwrite"], "leave one out"),
        (["a.png", "--shard", "3/2"], "--shard"),
        (["a.png", "--manifest", "gone/log.jsonl"], "cannot write the manifest gone/log.jsonl"),
        (["a.png", "--manifest", "a.png"], "a.png holds something else than a manifest; give --manifest another name"),
        (["a.png", "-o", "b.png", "--manifest", "./b.png"], "b.png would be the manifest and a result"),
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
        (["--size", "abc"], "--size: 'abc' is not of the form WIDTHxHEIGHT, e.g. 3840x2160"),
        (["--size", "1x2x3"], "'1x2x3' is not of the form"),
        (["--shard", "2"], "--shard: '2' is not of the form I/N, e.g. 2/8"),
        (["-t", "-3"], "'-3' is neither a number of pixels (0: no tiles) nor auto"),
        (["-t", "large"], "'large' is neither"),
    ],
)
def test_values_of_another_form_are_answered_with_the_form(upscale, args, message):
    save("a.png")
    result = upscale("a.png", *args)
    assert result.status == 2 and result.out == "" and message in result.err.splitlines()[-1]
    assert files() == ["a.png"]


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


def test_a_full_standard_output_is_told_in_words(upscale, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    save("a.png")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("a.png").read_bytes())))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Full()))
    result = upscale("-")
    assert result.status == 1
    assert "failed: -: cannot write to standard output (No space left on device)" in result.err


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


def test_what_another_process_is_writing_stays(upscale):
    save("in/a.png")
    Path("out").mkdir()
    with atomic(Path("out/a.png")) as file:
        (part,) = Path("out").glob(".*.part")
        assert upscale("in", "-o", "out").status == 0
        assert files("out") == [part.name, "a.png"]
        file.write(b"theirs")
    assert Path("out/a.png").read_bytes() == b"theirs" and files("out") == ["a.png"]
