from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from sr.data import BenchmarkFolder, GTFolder, PairedFolder, find_pictures
from sr.errors import SRError
from sr.image import read_rgb
from sr.resize import imresize

MakePictures = Callable[..., Path]


def prepared_pairs(gt: Path, lq: Path, scale: int = 2) -> PairedFolder:
    pictures = PairedFolder(gt, lq)
    pictures.prepare(scale)
    return pictures


# --- GT only -----------------------------------------------------------------------------------------------------


def test_gt_folder_reduces_the_whole_picture_cut_to_a_multiple(make_pictures: MakePictures) -> None:
    root = make_pictures("hr", {"b.png": (32, 40), "sub/a b.v1.png": (35, 44), "sub/a b.v2.png": (34, 43)})
    pictures = GTFolder(root)
    pictures.prepare(3)
    assert pictures.name == "hr"
    assert len(pictures) == 3
    assert pictures.names == ["b", "sub/a b.v1", "sub/a b.v2"]
    assert pictures.gt_sizes == [(30, 39), (33, 42), (33, 42)]
    for i, file in enumerate(["b.png", "sub/a b.v1.png", "sub/a b.v2.png"]):
        h, w = pictures.gt_sizes[i]
        lq, gt = pictures.pair(i)
        whole = read_rgb(root / file)[:, :h, :w]
        assert torch.equal(gt, whole)
        assert gt.is_contiguous() and lq.dtype == gt.dtype == torch.uint8
        assert torch.equal(lq, imresize(whole.contiguous(), size=(h // 3, w // 3)))


def test_a_set_can_be_prepared_for_another_scale(make_pictures: MakePictures) -> None:
    pictures = GTFolder(make_pictures("hr", {"a.png": (35, 35)}), name="other")
    assert pictures.name == "other"
    pictures.prepare(2)
    assert pictures.gt_sizes == [(34, 34)]
    pictures.prepare(4)
    assert pictures.gt_sizes == [(32, 32)]
    assert [x.shape[-1] for x in pictures.pair(0)] == [8, 32]


def test_names_of_any_script(make_pictures: MakePictures) -> None:
    root = make_pictures("фото", ["été/naïve.png", "日本/写真 1.png"])
    pictures = find_pictures(root, 2)
    assert pictures.name == "фото"
    assert pictures.names == ["été/naïve", "日本/写真 1"]


def test_the_set_must_be_prepared_first(make_pictures: MakePictures) -> None:
    with pytest.raises(RuntimeError, match="needs prepare"):
        len(GTFolder(make_pictures("hr")))


@pytest.mark.parametrize("scale", [0, -2, 1.5])
def test_impossible_scales(make_pictures: MakePictures, scale: int) -> None:
    with pytest.raises(SRError, match="scale must be a whole number"):
        GTFolder(make_pictures("hr")).prepare(scale)


def test_gt_folder_faults(make_pictures: MakePictures, tmp_path: Path) -> None:
    with pytest.raises(SRError, match="does not exist"):
        GTFolder(tmp_path / "nowhere").prepare(2)
    same = make_pictures("same", ["x/a.png", "x/a.jpg"])
    with pytest.raises(SRError, match=r"x/a\.jpg and a\.png differ only by suffix"):
        GTFolder(same).prepare(2)
    tiny = make_pictures("tiny", {"dot.png": (3, 50)})
    with pytest.raises(SRError, match=r"dot\.png is 50x3, too small for scale 4"):
        GTFolder(tiny).prepare(4)
    bad = make_pictures("bad", ["ok.png", "broken.png"])
    (bad / "broken.png").write_bytes(b"nonsense")
    with pytest.raises(SRError, match=r"broken\.png is not a picture"):
        GTFolder(bad).prepare(2)


def test_a_file_that_changes_after_the_check_is_named(make_pictures: MakePictures) -> None:
    root = make_pictures("hr", {"a.png": (32, 32)})
    pictures = find_pictures(root, 2)
    make_pictures("hr", {"a.png": (32, 36)})
    with pytest.raises(SRError, match=r"a\.png is 36x32, but its header said 32x32"):
        pictures.pair(0)


def test_turned_pictures_have_the_size_they_are_seen_with(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (48, 32)).save(tmp_path / "a.jpg", exif=exif)
    pictures = find_pictures(tmp_path, 2)
    assert pictures.gt_sizes == [(48, 32)]
    assert pictures.pair(0)[1].shape == (3, 48, 32)


# --- pairs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gt", "lq"),
    [
        ("0001.png", "0001.png"),
        ("0001.png", "0001.jpg"),
        ("0001.png", "0001x4.png"),
        ("0001.png", "0001_x4.png"),
        ("0001.png", "0001X4.png"),
        ("img_001_SRF_4_HR.png", "img_001_SRF_4_LR.png"),
        ("bird_HR_x4.png", "bird_LR_x4.png"),
        ("bird_HR_x4.png", "bird_LRBI_x4.png"),
        ("bird_GT.png", "bird_LQ.png"),
        ("HR_bird.png", "LR_bird.png"),
        ("sub/a.v1.png", "sub/a.v1x4.png"),
        ("GTI_HRV.png", "GTI_HRVx4.png"),  # letters around: no marks
        ("é.png", unicodedata.normalize("NFD", "é") + ".png"),
        ("éclair.png", unicodedata.normalize("NFD", "éclair") + "x4.png"),
    ],
)
def test_names_that_are_partners(make_pictures: MakePictures, gt: str, lq: str) -> None:
    hr = make_pictures("hr", {gt: (32, 40), "other/z.png": (16, 16)})
    lr = make_pictures("lr", {lq: (8, 10), "other/z.png": (4, 4)})
    pictures = prepared_pairs(hr, lr, 4)
    assert pictures.names == [gt.rpartition(".")[0], "other/z"] or pictures.names[0] == "other/z"
    i = pictures.names.index(gt.rpartition(".")[0])
    got_lq, got_gt = pictures.pair(i)
    assert torch.equal(got_lq, read_rgb(lr / lq))
    assert torch.equal(got_gt, read_rgb(hr / gt))


@pytest.mark.parametrize(
    ("gts", "lqs", "message"),
    [
        (["a.png", "b.png"], ["a.png"], r"'hr': 1 GT picture has no LQ partner in .*lr: b\.png"),
        (["a.png"], ["a.png", "c.png", "b.png"], r"2 LQ pictures have no GT partner in .*hr: b\.png, c\.png"),
        ([f"{i}.png" for i in range(9)], ["0.png"], r"1\.png, 2\.png, 3\.png and 5 more"),
        (["x/a.png"], ["y/a.png"], r"no LQ partner .*no GT partner"),
        (["a.png"], ["ax4.png"], r"the names say x4, but scale is 2"),
        (["a.png", "b.png"], ["c.png", "b.png"], r"no LQ partner in .*: a\.png; .*no GT partner in .*: c\.png"),
        (["a_HR.png", "a-GT.png"], ["a_LR.png"], r"a-GT\.png, a_HR\.png could belong to a_LR\.png"),
        (["a.png"], ["ax2.png", "a_x2.png"], r"a\.png could belong to a_x2\.png, ax2\.png"),
        (["a.png"], ["a.png", "a.jpg"], r"a\.jpg and a\.png differ only by suffix"),
    ],
)
def test_names_that_are_not(make_pictures: MakePictures, gts: list[str], lqs: list[str], message: str) -> None:
    with pytest.raises(SRError, match=message):
        prepared_pairs(
            make_pictures("hr", dict.fromkeys(gts, (32, 32))), make_pictures("lr", dict.fromkeys(lqs, (16, 16)))
        )


def test_equal_names_go_first(make_pictures: MakePictures) -> None:
    hr = make_pictures("hr", {"a.png": (32, 32), "ax2.png": (32, 36)})
    lr = make_pictures("lr", {"a.png": (16, 16), "ax2.png": (16, 18)})
    pictures = prepared_pairs(hr, lr)
    assert torch.equal(pictures.pair(1)[0], read_rgb(lr / "ax2.png"))


def test_a_little_larger_gt_is_cropped_at_the_right_and_bottom(make_pictures: MakePictures) -> None:
    hr, lr = make_pictures("hr", {"a.png": (35, 42)}), make_pictures("lr", {"a.png": (8, 10)})
    pictures = prepared_pairs(hr, lr, 4)
    assert pictures.gt_sizes == [(32, 40)]
    assert torch.equal(pictures.pair(0)[1], read_rgb(hr / "a.png")[:, :32, :40])


@pytest.mark.parametrize("size", [(36, 40), (31, 40), (32, 44), (16, 20), (40, 32)])
def test_wrong_sizes_are_found_before_anything_is_decoded(make_pictures: MakePictures, size: tuple[int, int]) -> None:
    hr = make_pictures("hr", {"a.png": (32, 40), "s/b.png": size, "s/c.png": size})
    lr = make_pictures("lr", dict.fromkeys(["a.png", "s/b.png", "s/c.png"], (8, 10)))
    text = rf"'hr': GT must be 4 x LQ, but .*hr/s/b\.png is {size[1]}x{size[0]} and .*lr/s/b\.png is 10x8 \(and 1 more"
    with pytest.raises(SRError, match=text):
        prepared_pairs(hr, lr, 4)


def test_two_folders_the_wrong_way_round(make_pictures: MakePictures) -> None:
    hr, lr = make_pictures("hr", {"a.png": (32, 40)}), make_pictures("lr", {"a.png": (16, 20)})
    with pytest.raises(SRError, match=r"GT and LQ are exchanged: .*lr.a.png is 20x16 and .*hr.a.png is 40x32;"):
        prepared_pairs(lr, hr)


# --- benchmarks --------------------------------------------------------------------------------------------------


def test_benchmark_folder_takes_what_is_there(make_pictures: MakePictures, tmp_path: Path) -> None:
    make_pictures("Set/HR", {"a.png": (32, 40)})
    make_pictures("Set/LR_bicubic/X4", {"a.png": (8, 10)})
    pictures = BenchmarkFolder(tmp_path / "Set")
    assert pictures.name == "Set"
    pictures.prepare(4)
    assert torch.equal(pictures.pair(0)[0], read_rgb(tmp_path / "Set/LR_bicubic/X4/a.png"))
    pictures.prepare(2)  # no X2: from HR, and nothing of LR_bicubic counts as high resolution
    assert pictures.names == ["a"]
    assert pictures.pair(0)[0].shape == (3, 16, 20)


def test_benchmark_folder_without_hr(make_pictures: MakePictures) -> None:
    assert find_pictures(make_pictures("plain", ["a.png", "x/b.png"]), 2).names == ["a", "x/b"]
    root = make_pictures("half/LR_bicubic/X2", {"a.png": (8, 8)}).parent.parent
    with pytest.raises(SRError, match="holds LR_bicubic but no HR"):
        find_pictures(root, 2)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_lr_made_on_the_fly_is_matlabs(scale: int) -> None:
    root = Path(__file__).parents[3] / "shared" / "data" / "benchmarks" / "Set5"
    if not root.is_dir():
        pytest.skip("the benchmark pictures are not here")
    given = find_pictures(root, scale)
    made = GTFolder(root / "HR")
    made.prepare(scale)
    assert given.names == made.names and len(made) == 5
    for i in (0, 1):
        for a, b in zip(given.pair(i), made.pair(i), strict=True):
            assert torch.equal(a, b)


def test_the_sample_set_is_complete_and_attributed() -> None:
    root = Path(__file__).parents[2] / "datasets" / "sample"
    train, val = find_pictures(root / "train", 4), find_pictures(root / "val", 4)
    assert len(train) >= 18 and len(val) == 4
    assert all(h % 12 == 0 and w % 12 == 0 for h, w in val.gt_sizes)
    listed = {line.split(",")[0] for line in (root / "LICENCES.csv").read_text().splitlines()[1:]}
    files = [p for p in root.rglob("*") if p.is_file() and p.name != "LICENCES.csv"]
    assert listed == {p.relative_to(root).as_posix() for p in files}
    assert sum(p.stat().st_size for p in files) < 4e6


def test_a_folder_of_data_sets_is_not_one(make_pictures: MakePictures, tmp_path: Path) -> None:
    for name in ("Set5", "Set14"):
        make_pictures(f"benchmarks/{name}/HR", ["a.png"])
    with pytest.raises(SRError, match=r"holds several data sets; name them one by one: .*Set14 .*Set5"):
        find_pictures(tmp_path / "benchmarks", 2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(make_pictures: MakePictures) -> None:
    root = make_pictures("hr", ["a.png"])
    os.mkfifo(root / "pipe.png")
    with pytest.raises(SRError, match=r"pipe\.png is no file but a pipe"):
        GTFolder(root).prepare(2)
