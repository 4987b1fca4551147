"""The pack: complete or not there, built once, rebuilt where something changed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sr.data import GTFolder, PairedFolder, find_pictures
from sr.data import pack as packing
from sr.data.pack import Pack, as_picture, open_pack
from sr.errors import SRError

MakePictures = Callable[..., Path]
BENCHMARKS = Path(__file__).parents[3] / "shared" / "data" / "benchmarks"
SIZES = {"a.png": (32, 40), "sub/b.png": (33, 50), "c.png": (16, 16)}


def prepared(root: Path, scale: int = 2) -> GTFolder:
    pictures = GTFolder(root)
    pictures.prepare(scale)
    return pictures


def assert_holds(pack: Pack, pictures: GTFolder) -> None:
    assert len(pack) == len(pictures)
    for i in range(len(pictures)):
        lq, gt = pictures.pair(i)
        assert torch.equal(as_picture(pack.gt(i)), gt) and torch.equal(as_picture(pack.lq(i)), lq)


def packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pack"))


def test_a_pack_holds_what_decoding_gives(make_pictures: MakePictures, tmp_path: Path) -> None:
    pictures = prepared(make_pictures("hr", SIZES))
    pack = open_pack(pictures, tmp_path / "new" / "packs")
    assert_holds(pack, pictures)
    assert_holds(pickle.loads(pickle.dumps(pack)), pictures)
    assert pack.path.parent == tmp_path / "new" / "packs"
    content = [p.suffix for p in pack.path.parent.iterdir()]
    assert sorted(content) == [".lock", ".pack"]


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_training_sees_the_lq_that_evaluation_sees(make_pictures: MakePictures, scale: int) -> None:
    odd = make_pictures("odd", {"a.png": (37, 53), "b.png": (64, 41), "c.png": (29, 29)})
    folders = [(odd, odd)]
    folders += [(BENCHMARKS / name / "HR", BENCHMARKS / name) for name in ("Set5", "Set14") if BENCHMARKS.is_dir()]
    for gt, benchmark in folders:
        pack, shown = open_pack(prepared(gt, scale)), find_pictures(benchmark, scale)
        for i in range(len(shown)):  # from LR_bicubic where there is one: MATLAB's own
            assert torch.equal(as_picture(pack.lq(i)), shown.pair(i)[0]), shown.names[i]


def test_pairs_are_packed_with_their_own_lq(make_pictures: MakePictures, cache_home: Path) -> None:
    hr, lr = make_pictures("hr", {"a.png": (32, 32)}), make_pictures("lr", {"a.png": (16, 16)})
    pairs = PairedFolder(hr, lr)
    pairs.prepare(2)
    assert_holds(open_pack(pairs), pairs)  # type: ignore[arg-type]
    single = GTFolder(hr)
    single.prepare(2)
    assert_holds(open_pack(single), single)
    assert len(packs(cache_home)) == 2


def test_nothing_is_decoded_the_second_time(
    make_pictures: MakePictures, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    pictures = prepared(make_pictures("hr", SIZES))
    first = open_pack(pictures)
    before = first.path.stat().st_mtime_ns

    def fail(*args: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(GTFolder, "read_gt", fail)
    open_pack(prepared(pictures.root))
    assert first.path.stat().st_mtime_ns == before
    with pytest.raises(AssertionError):
        open_pack(prepared(pictures.root, 3))  # another scale is another pack


@pytest.mark.parametrize("change", ["content", "added", "removed", "renamed", "resized"])
def test_a_change_rebuilds_what_it_must(
    make_pictures: MakePictures, monkeypatch: pytest.MonkeyPatch, cache_home: Path, change: str
) -> None:
    root = make_pictures("hr", SIZES)
    open_pack(prepared(root))
    match change:
        case "content":
            Image.new("RGB", (40, 32), "red").save(root / "a.png")
        case "added":
            shutil.copy(root / "a.png", root / "aa.png")
        case "removed":
            (root / "a.png").unlink()
        case "renamed":
            (root / "a.png").rename(root / "z.png")
        case "resized":
            Image.new("RGB", (64, 48), "red").save(root / "a.png")
    decoded = []
    gt = GTFolder.read_gt
    monkeypatch.setattr(GTFolder, "read_gt", lambda self, i: decoded.append(self.names[i]) or gt(self, i))
    pictures = prepared(root)
    pack = open_pack(pictures)
    assert decoded == {"content": ["a"], "added": ["aa"], "removed": [], "renamed": ["z"], "resized": ["a"]}[change]
    assert_holds(pack, pictures)
    assert packs(cache_home) == [pack.path]


def test_an_open_pack_outlives_its_replacement(make_pictures: MakePictures) -> None:
    root = make_pictures("hr", SIZES)
    old = open_pack(prepared(root))
    before = old.gt(0).copy()
    Image.new("RGB", (40, 32), "red").save(root / "a.png")
    new = open_pack(prepared(root))
    assert np.array_equal(old.gt(0), before) and not np.array_equal(new.gt(0), before)


@pytest.mark.parametrize("damage", [b"", b"srpack1\n", b"junk" * 100, None])
def test_a_damaged_pack_is_built_anew(make_pictures: MakePictures, damage: bytes | None) -> None:
    pictures = prepared(make_pictures("hr", SIZES))
    path = open_pack(pictures).path
    path.write_bytes(path.read_bytes()[:-10] if damage is None else damage)
    assert_holds(open_pack(pictures), pictures)


def test_unreadable_pictures(make_pictures: MakePictures, caplog: pytest.LogCaptureFixture, cache_home: Path) -> None:
    root = make_pictures("hr", SIZES)
    whole = (root / "a.png").read_bytes()
    (root / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SRError, match=r"a\.png is damaged"):
        open_pack(prepared(root))
    assert not list(cache_home.glob("*pack*"))
    for _ in range(2):  # the second time from the pack
        caplog.clear()
        pictures = GTFolder(root)
        pictures.prepare(2, on_error="skip")
        with caplog.at_level(logging.WARNING):
            pack = open_pack(pictures)
        assert pictures.names == ["c", "sub/b"] and len(pictures.skipped) == 1
        assert "1 pictures of 'hr' are left out:\n" in caplog.text and "a.png is damaged" in caplog.text
        assert_holds(pack, pictures)
    with pytest.raises(SRError, match=r"a\.png is damaged"):  # skipping once does not excuse it for ever
        open_pack(prepared(root))
    (root / "a.png").write_bytes(whole)
    assert_holds(open_pack(prepared(root)), prepared(root))


def test_the_size_is_announced_and_a_full_disk_found_before_writing(
    make_pictures: MakePictures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache_home: Path
) -> None:
    pictures = prepared(make_pictures("hr", {"a.png": (512, 1024)}))
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(SRError, match=r"(?s)takes 2 MiB, but .* has 0 free.*data\.cache_dir"):
        open_pack(pictures)
    monkeypatch.undo()
    with caplog.at_level(logging.INFO):
        open_pack(pictures, cache_home)
    assert "packing 1 pictures of 'hr': 1.9 MiB in" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_meanwhile_is_an_error(
    make_pictures: MakePictures, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    pictures = prepared(make_pictures("hr", SIZES))
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, mode="r": real(Path("/dev/full"), "wb") if mode == "xb" else real(self, mode)
    )
    with pytest.raises(SRError, match=r"(?s)cannot write the pack .*No space left.*data\.cache false"):
        open_pack(pictures)
    assert not list(cache_home.glob("*.pack"))


def test_a_place_that_cannot_be_written(make_pictures: MakePictures, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SRError, match=r"(?s)cannot write the pack .*data\.cache_dir"):
        open_pack(prepared(make_pictures("hr", SIZES)), tmp_path / "file")


def build_and_count(root: Path, counter: Path) -> None:
    gt = GTFolder.read_gt

    def counted(self: GTFolder, i: int) -> torch.Tensor:
        with counter.open("a") as file:
            file.write(f"{self.names[i]}\n")
        time.sleep(0.05)
        return gt(self, i)

    GTFolder.read_gt = counted  # type: ignore[method-assign]
    open_pack(prepared(root))


def test_processes_that_start_together_build_it_once(make_pictures: MakePictures, tmp_path: Path) -> None:
    root = make_pictures("hr", SIZES)
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    jobs = [context.Process(target=build_and_count, args=(root, tmp_path / "counter")) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert sorted((tmp_path / "counter").read_text().split()) == ["a", "c", "sub/b"]
    assert_holds(open_pack(prepared(root)), prepared(root))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_build_leaves_nothing_that_is_taken_for_a_pack(make_pictures: MakePictures, cache_home: Path) -> None:
    root = make_pictures("hr", {f"{i}.png": (200, 200 + i) for i in range(40)})
    rng = np.random.default_rng(0)
    undisturbed = open_pack(prepared(root), cache_home / "other").path.read_bytes()
    killed = 0
    for _ in range(10):
        for path in packs(cache_home):
            path.unlink()
        pid = os.fork()
        if pid == 0:
            try:
                open_pack(prepared(root))
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        killed += not packs(cache_home)
        pack = open_pack(prepared(root))
        assert pack.path.read_bytes() == undisturbed
        assert not list(cache_home.glob("*.part"))
    assert killed >= 3  # most of them really in the middle


def test_the_index_is_readable(make_pictures: MakePictures) -> None:
    path = open_pack(prepared(make_pictures("hr", SIZES))).path
    content = path.read_bytes()
    index = json.loads(content[int.from_bytes(content[8:16], "little") :])
    assert [e["made_from"][0] for e in index] == ["a", "c", "sub/b"]
