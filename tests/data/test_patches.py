from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from sr.data import GTFolder, PairedFolder, PatchDataset, PictureDataset, find_pictures
from sr.data.pack import open_pack
from sr.errors import SRError

MakePictures = Callable[..., Path]


@pytest.fixture
def coordinates(tmp_path: Path) -> PairedFolder:
    """A pair whose pixels hold their own position: GT (y, x, number), LQ the position / 2."""
    for folder, edge in (("gt", 96), ("lq", 48)):
        (tmp_path / folder).mkdir()
        y, x = np.mgrid[:edge, : edge + edge // 4].astype(np.uint8)
        Image.fromarray(np.stack([y, x, np.full_like(y, 7)], -1)).save(tmp_path / folder / "a.png")
    return PairedFolder(tmp_path / "gt", tmp_path / "lq")


def untangle(patch: Tensor) -> tuple[int, int, tuple[bool, bool, bool]]:
    """Top-left position of a patch of coordinates, and the symmetry as (rows swapped with columns, y down, x down)."""
    ys, xs = patch[0].int(), patch[1].int()
    swapped = bool(ys[0, 0] == ys[1, 0])
    if swapped:
        ys, xs = ys.T, xs.T
    n = patch.shape[-1]
    down, right = bool(ys[0, 0] > ys[-1, 0]), bool(xs[0, 0] > xs[0, -1])
    y, x = int(ys.min()), int(xs.min())
    rows, cols = torch.arange(y, y + n), torch.arange(x, x + n)
    assert torch.equal(ys, (rows.flip(0) if down else rows)[:, None].expand(n, n).int())
    assert torch.equal(xs, (cols.flip(0) if right else cols)[None].expand(n, n).int())
    return y, x, (swapped, down, right)


@pytest.mark.parametrize("cache", [True, False])
def test_lq_and_gt_are_the_same_place_turned_the_same_way(coordinates: PairedFolder, cache: bool) -> None:
    data = PatchDataset(coordinates, scale=2, gt_size=24, seed=3)
    if cache:
        data.pack()
    symmetries, places = set(), set()
    for i in range(150):
        sample = data[i]
        assert sample["lq"].shape == (3, 12, 12) and sample["gt"].shape == (3, 24, 24)
        assert all(sample[k].dtype == torch.uint8 and sample[k].is_contiguous() for k in ("lq", "gt"))
        y, x, symmetry = untangle(sample["lq"])
        assert untangle(sample["gt"]) == (2 * y, 2 * x, symmetry)
        symmetries.add(symmetry)
        places.add((y, x))
    assert len(symmetries) == 8
    assert max(y for y, _ in places) == 36 and max(x for _, x in places) == 48  # the last row and column are reached
    assert min(y for y, _ in places) == min(x for _, x in places) == 0


def test_lq_is_a_part_of_the_reduced_picture_not_a_reduced_part(picture_folder: Path) -> None:
    pictures = GTFolder(picture_folder)
    data = PatchDataset(pictures, scale=2, gt_size=16)
    data.pack()
    wholes = [pictures.pair(i)[0] for i in range(len(pictures))]
    turned = [torch.rot90(w.flip(-1) if f else w, k, (1, 2)) for w in wholes for f in (0, 1) for k in range(4)]
    for i in range(10):
        lq = data[i]["lq"]
        windows = [w.unfold(1, 8, 1).unfold(2, 8, 1) for w in turned]
        assert any((w == lq[:, None, None]).all(-1).all(-1).all(0).any() for w in windows)


def test_a_sample_depends_on_seed_and_index_only(picture_folder: Path) -> None:
    def make(seed: int, cache: bool) -> PatchDataset:
        data = PatchDataset(GTFolder(picture_folder), 2, 16, seed=seed)
        if cache:
            data.pack()
        return data

    first, again, other = make(5, True), make(5, False), make(6, True)
    indices = [4, 0, 10**12, 4, 3]
    a, b = [first[i] for i in indices], [again[i] for i in reversed(indices)][::-1]
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x["lq"], y["lq"]) and torch.equal(x["gt"], y["gt"])
    assert torch.equal(a[0]["gt"], a[3]["gt"])
    assert not torch.equal(a[0]["gt"], other[4]["gt"])
    loader = DataLoader(first, batch_size=3, sampler=range(6), num_workers=2, multiprocessing_context="fork")
    batches = torch.cat([b["gt"] for b in loader])
    assert torch.equal(batches, torch.stack([first[i]["gt"] for i in range(6)]))


def test_pictures_are_drawn_in_proportion_to_their_area(tmp_path: Path) -> None:
    for name, size, value in (("a", (20, 20), 10), ("b", (60, 40), 20)):
        (tmp_path / name).mkdir()
        Image.new("L", size, value).save(tmp_path / name / "x.png")
    data = PatchDataset([GTFolder(tmp_path / "a"), GTFolder(tmp_path / "b")], 2, 20, seed=1)
    data.pack()
    values = [int(data[i]["gt"][0, 0, 0]) for i in range(1400)]
    assert set(values) == {10, 20}
    assert 160 < values.count(10) < 240  # 1/7 of 1400 is 200


def test_a_patch_may_be_the_whole_picture(make_pictures: MakePictures) -> None:
    data = PatchDataset(GTFolder(make_pictures("hr", {"a.png": (24, 24)})), 3, 24)
    assert data[0]["gt"].shape == (3, 24, 24) and data[0]["lq"].shape == (3, 8, 8)


def test_small_pictures_are_left_out_with_one_warning(
    make_pictures: MakePictures, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_pictures("hr", {"a.png": (64, 64), "b.png": (64, 30), "c.png": (31, 90)})
    with caplog.at_level(logging.WARNING):
        data = PatchDataset(GTFolder(root), 2, 32)
    assert [r.getMessage() for r in caplog.records] == [
        "2 of 3 pictures are smaller than gt_size 32 in one direction and are left out"
    ]
    assert len(data) == 1
    assert data[5]["gt"].shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("scale", "gt_size", "message"),
    [
        (3, 32, r"gt_size 32 is not a multiple of scale 3; the nearest that fit: 30 or 33"),
        (4, 2, r"the nearest that fit: 4"),
        (4, 0, r"the nearest that fit: 4"),
        (2, 64, r"gt_size 64 is larger than every picture of 'pictures'; the largest possible is 32"),
        (3, 33, r"the largest possible is 30"),
    ],
)
def test_patch_sizes_that_do_not_fit(picture_folder: Path, scale: int, gt_size: int, message: str) -> None:
    with pytest.raises(SRError, match=message):
        PatchDataset(GTFolder(picture_folder), scale, gt_size)


def test_other_faults(picture_folder: Path) -> None:
    with pytest.raises(SRError, match="nothing to train on"):
        PatchDataset([], 2, 16)
    with pytest.raises(SRError, match="seed must not be negative"):
        PatchDataset(GTFolder(picture_folder), 2, 16, seed=-1)


def test_an_unreadable_picture_is_named_before_training(make_pictures: MakePictures) -> None:
    root = make_pictures("hr", [f"{c}.png" for c in "abcdef"])
    for name in ("b.png", "e.png"):
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[: len(data) // 2])  # the header is whole
    patches = PatchDataset(GTFolder(root), 2, 16)
    with pytest.raises(SRError, match=r"b\.png is damaged or incomplete.*\n\(and 1 more pictures cannot be read\)"):
        patches.pack()
    with pytest.raises(SRError, match=r"\.png is damaged"):
        for i in range(50):
            patches[i]


@pytest.mark.parametrize("cache", [True, False])
def test_an_unreadable_picture_is_left_out_if_so_wished(
    make_pictures: MakePictures, cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_pictures("hr", [f"{c}.png" for c in "abc"])
    (root / "a.png").write_bytes((root / "a.png").read_bytes()[:200])
    (root / "d.png").write_text("no picture")
    good = PatchDataset(GTFolder(make_pictures("good", ["b.png", "c.png"])), 2, 16)
    with caplog.at_level(logging.WARNING):
        patches = PatchDataset(GTFolder(root), 2, 16, on_error="skip")
        if cache:
            patches.pack()
        seen = [patches[i]["gt"] for i in range(40)]
    named = " ".join(r.getMessage() for r in caplog.records)
    assert named.count("a.png is damaged") == named.count("d.png is not a picture") == 1
    if cache:
        assert patches.sets[0].names == ["b", "c"]
        assert all(torch.equal(a, good[i]["gt"]) for i, a in enumerate(seen))  # as if the two had never been there
    (root / "b.png").write_bytes(b"")
    (root / "c.png").write_bytes(b"")
    with pytest.raises(SRError, match=r"no picture of 'hr' can be read, e\.g\. .*\.png is"):
        patches = PatchDataset(GTFolder(root), 2, 16, on_error="skip")
        if cache:
            patches.pack()
        patches[0]


def test_the_picture_of_a_sample_can_be_named(make_pictures: MakePictures) -> None:
    pictures = GTFolder(make_pictures("hr", {"a.png": (16, 16), "sub/b.png": (16, 16)}))
    data = PatchDataset(pictures, 2, 16)
    for i in range(8):
        gt = pictures.read_gt(pictures.names.index(data.name(i).removeprefix("hr/")))
        patch = data[i]["gt"]
        assert any(torch.equal(torch.rot90(t, k, (1, 2)), patch) for t in (gt, gt.flip(-1)) for k in range(4))


def test_lq_is_left_to_a_degradation(picture_folder: Path) -> None:
    data = PatchDataset(GTFolder(picture_folder), 2, 16, lq=False)
    both = PatchDataset(GTFolder(picture_folder), 2, 16)
    for _ in range(2):
        assert data[3].keys() == {"gt", "index"} and data[3]["index"] == 3
        assert torch.equal(data[3]["gt"], both[3]["gt"])
        data.pack()


def test_picture_dataset_gives_whole_pictures_with_names(picture_folder: Path) -> None:
    pictures = find_pictures(picture_folder, 2)
    data = PictureDataset(pictures, rank=0, world_size=2)
    packed = PictureDataset(pictures, rank=0, world_size=2, pack=open_pack(pictures))
    assert len(data) == len(packed) == 2
    for sample in (data[1], packed[1]):
        assert sample["name"] == "sub/c" and sample["counts"]
        assert torch.equal(sample["lq"], pictures.pair(2)[0]) and torch.equal(sample["gt"], pictures.pair(2)[1])
    assert len(PictureDataset(pictures)) == 3
    assert [s["counts"] for s in PictureDataset(pictures, rank=1, world_size=2)] == [True, False]  # a stand-in
