"""The check of data sets: every fault planted in tiny folders is found, and sound folders yield nothing."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from sr.data import BenchmarkFolder, GTFolder, PairedFolder, PictureSet
from sr.data.check import check
from sr.data.findings import Finding, Report
from sr.data.folders import Picture
from sr.image import list_images, read_rgb, save_image, to_image
from sr.resize import imresize

MakePictures = Callable[..., Path]
SET5 = Path(__file__).parents[3] / "shared/data/benchmarks/Set5"


def reduced(gt: Path, lq: Path, scale: int = 2, mark: str = "") -> Path:
    """A folder of MATLAB-bicubic LQ for a folder of GT."""
    lq.mkdir()
    for file in list_images(gt):
        save_image(to_image(imresize(read_rgb(file), 1 / scale)), lq / f"{file.stem}{mark}.png")
    return lq


def find(report: Report, words: str) -> Finding:
    """The one finding whose message holds the words."""
    found = [f for f in report.findings if words in f.message]
    assert len(found) == 1, f"{len(found)} findings say {words!r}: {report.findings}"
    return found[0]


def names(finding: Finding) -> list[str]:
    return [f.name for f in finding.files]


def png_header(width: int, height: int, depth: int = 8, rows: bytes = b"") -> bytes:
    """A PNG file by the letter of the format, RGB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# --- sound folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thorough", [False, True])
def test_sound_folders_yield_nothing(make_pictures: MakePictures, tmp_path: Path, thorough: bool) -> None:
    gt = make_pictures("gt", {f"{i}.png": (48, 40) for i in range(4)})
    hr = make_pictures("bench/HR", ["x.png", "y.png"])
    (hr.parent / "LR_bicubic").mkdir()
    reduced(hr, hr.parent / "LR_bicubic/X2", mark="x2")
    train = [GTFolder(make_pictures("plain", ["a.png", "sub/b.jpg"])), PairedFolder(gt, reduced(gt, tmp_path / "lq"))]
    val = [BenchmarkFolder(hr.parent), BenchmarkFolder(make_pictures("flat", ["c.png"]))]
    report = check(train, val, 2, 32, thorough=thorough)
    assert report.findings == [] and report.ok
    assert [line.split(":")[0] for line in report.summary] == [
        "plain (train)",
        "gt (train)",
        "bench (val)",
        "flat (val)",
    ]
    assert all(s.scale == 0 for s in train)  # as they were
    if thorough:
        assert report.summary[1].endswith("LQ of 4 of 4 pairs compared, spread evenly: 4 x MATLAB bicubic, bit for bit")


def test_a_report_for_people_and_for_programs(make_pictures: MakePictures) -> None:
    root = make_pictures("gt", {f"[red]{i}.png": (33, 41) for i in range(5)})
    report = check([GTFolder(root)], [], 2, 32, thorough=False)
    out = io.StringIO()
    Console(file=out, width=120).print(report.table())
    text = out.getvalue()
    assert "5 of 5 GT pictures" in text and "[red]0.png" in text and "and 2 more" in text
    data = json.loads(report.to_json())
    assert data["ok"] is True and data["summary"] == report.summary
    assert data["findings"][0]["level"] == "note"
    assert data["findings"][0]["files"] == [str(f) for f in list_images(root)]


def test_progress_reaches_its_end(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt")
    steps: list[tuple[int, int]] = []
    check([PairedFolder(gt, reduced(gt, tmp_path / "lq"))], [], 2, 32, progress=lambda *s: steps.append(s))
    assert steps == [(i, 6) for i in range(1, 7)]  # four files, two pairs


# --- files --------------------------------------------------------------------------------------------------------


def test_unreadable_files_are_all_listed(make_pictures: MakePictures) -> None:
    root = make_pictures("gt", ["cut_a.jpg", "cut_b.png", "good.png"])
    for cut in (root / "cut_a.jpg", root / "cut_b.png"):
        cut.write_bytes(cut.read_bytes()[:-60])
    (root / "empty.png").touch()
    (root / "text.png").write_text("not a picture")
    (root / "huge.png").write_bytes(png_header(100_000, 100_000))

    quick = check([GTFolder(root)], [], 2, 32, thorough=False)
    assert names(find(quick, "0 bytes")) == ["empty.png"]
    assert names(find(quick, "not a picture in a format")) == ["text.png"]
    assert names(find(quick, "pixels, the most that is read")) == ["huge.png"]
    assert len(quick.findings) == 3 and not quick.ok

    full = check([GTFolder(root)], [], 2, 32)
    damaged = [f.files[0].name for f in full.findings if "damaged" in f.message]
    assert sorted(damaged) == ["cut_a.jpg", "cut_b.png"] and len(full.findings) == 5

    skipping = check([GTFolder(root)], [], 2, 32, on_error="skip")
    assert skipping.ok and {f.level for f in skipping.findings} == {"warning"} and len(skipping.findings) == 5


def test_nothing_usable_is_an_error_even_if_files_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    report = check([GTFolder(tmp_path)], [], 2, 32, on_error="skip")
    assert find(report, "no picture of the set can be used").level == "error"


def test_folders_and_names(make_pictures: MakePictures, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half/LR_bicubic").mkdir(parents=True)
    twins = make_pictures("twins", ["x/a.png", "x/a.jpg", "b.png"])
    train = [GTFolder(tmp_path / "nowhere"), GTFolder(tmp_path / "empty"), BenchmarkFolder(tmp_path / "half")]
    report = check([*train, GTFolder(twins)], [], 2, 32, thorough=False)
    assert find(report, "does not exist").data_set == "nowhere"
    assert find(report, "no picture in").data_set == "empty"
    assert find(report, "LR_bicubic but no HR").data_set == "half"
    assert names(find(report, "suffix")) == ["a.jpg", "a.png"]
    assert len(report.findings) == 4 and not report.ok


def test_what_becomes_of_colours_is_noted(make_pictures: MakePictures) -> None:
    root = make_pictures("gt", ["a.png"])
    image = Image.open(root / "a.png")
    image.convert("RGBA").save(root / "alpha.png")
    image.rotate(90).convert("P").save(root / "palette.png")
    image.rotate(180).convert("L").save(root / "grey.png")
    Image.fromarray(np.arange(32 * 40, dtype=np.uint16).reshape(32, 40) * 51).save(root / "grey16.png")
    rows = b"".join(b"\0" + bytes(range(240)) for _ in range(32))  # no filter, 40 x 3 x 2 bytes
    (root / "rgb16.png").write_bytes(png_header(40, 32, 16, rows))
    image.convert("CMYK").save(root / "cmyk.tif")
    image.save(root / "frames.webp", save_all=True, append_images=[image.rotate(90)])
    report = check([GTFolder(root)], [], 2, 32, thorough=False)
    assert names(find(report, "16 bit")) == ["grey16.png", "rgb16.png"]
    assert names(find(report, "alpha")) == ["alpha.png"]
    assert names(find(report, "palette")) == ["palette.png"]
    assert names(find(report, "grey")) == ["grey.png", "grey16.png"]
    assert {f.level for f in report.findings[2:]} == {"note"}
    assert find(report, "CMYK").level == find(report, "animation").level == "error"


# --- sizes and partners -------------------------------------------------------------------------------------------


def test_pictures_without_partner_do_not_hide_other_faults(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt", ["a.png", "b.png", "c.png", "left.png"])
    lq = reduced(gt, tmp_path / "lq", mark="x2")
    (lq / "leftx2.png").rename(lq / "right.png")
    save_image(Image.new("RGB", (7, 7)), lq / "bx2.png")
    report = check([PairedFolder(gt, lq)], [], 2, 32)
    lonely = find(report, "no LQ partner")
    assert lonely.level == "error" and names(lonely) == ["left.png", "right.png"]
    assert "left.png" in lonely.message and "right.png" in lonely.message
    assert names(find(report, "is not 2 x LQ")) == ["b.png", "bx2.png"]
    assert len(report.findings) == 2
    assert "2 of 2 pairs compared" in report.summary[0]


def test_the_scale_that_sizes_speak_of(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt", {"a.png": (48, 64), "b.png": (40, 32)})
    report = check([PairedFolder(gt, reduced(gt, tmp_path / "lq", 4))], [], 2, 32, thorough=False)
    assert "GT of 2 pairs is not 2 x LQ, e.g. 64x48 and 16x12; the sizes say scale 4" in find(report, "e.g.").message
    report = check([PairedFolder(tmp_path / "lq", gt)], [], 4, 32, thorough=False)
    assert "e.g. 16x12 and 64x48; GT and LQ are exchanged" in find(report, "e.g.").message
    assert not report.ok


def test_small_and_cropped_pictures(make_pictures: MakePictures) -> None:
    a = GTFolder(make_pictures("a", {"small.png": (64, 30), "odd.png": (65, 67), "good.png": (64, 64)}))
    b = GTFolder(make_pictures("b", {"small.png": (16, 16)}))
    report = check([a, b], [b], 2, 32, thorough=False)
    assert [names(f) for f in report.findings if "smaller than gt_size 32" in f.message] == [["small.png"]] * 2
    assert "1 of 3 GT pictures" in find(report, "cropped").message
    assert report.ok
    assert not check([b], [], 2, 32, thorough=False).ok
    assert "is not a multiple of scale 3" in check([a], [], 3, 32, thorough=False).findings[0].message
    tiny = GTFolder(make_pictures("tiny", {"dot.png": (3, 50), "c.png": (64, 64)}))
    assert names(find(check([], [tiny], 4, 32, thorough=False), "smaller than one pixel")) == ["dot.png"]


# --- the same picture twice ---------------------------------------------------------------------------------------


def test_copies(make_pictures: MakePictures) -> None:
    train = make_pictures("train", {f"{i}.png": (64, 96) for i in range(6)})
    val = make_pictures("val", {f"{i}.bmp": (64, 96) for i in range(10, 13)})
    for file in [*list_images(train), *list_images(val)]:  # as smooth as photographs
        Image.open(file).resize((384, 256), Image.Resampling.BICUBIC).save(file)
    Image.open(train / "0.png").save(train / "0 copy.bmp")
    Image.open(train / "1.png").save(val / "leak.webp", lossless=True)
    Image.open(train / "2.png").transpose(Image.Transpose.ROTATE_90).save(val / "turned.jpg", quality=60)
    Image.open(train / "3.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((96, 64)).save(train / "small.png")
    Image.open(val / "10.bmp").save(val / "10 copy.png")  # counts twice in validation, and harms nobody
    report = check([GTFolder(train)], [GTFolder(val)], 2, 32)
    leak = find(report, "pixel for pixel, in train and val")
    assert leak.level == "error" and names(leak) == ["1.png", "leak.webp"] and leak.data_set == "train, val"
    twice = find(report, "pixel for pixel, 2 times in train")
    assert twice.level == "warning" and names(twice) == ["0 copy.bmp", "0.png"]
    near = [f for f in report.findings if "nearly the same" in f.message]
    assert [names(f) for f in near] == [["2.png", "turned.jpg"], ["3.png", "small.png"]]
    assert len(report.findings) == 4


def test_flat_pictures_are_no_copies_of_one_another(tmp_path: Path) -> None:
    for level in (0, 100, 101):
        Image.new("RGB", (32, 32), (level,) * 3).save(tmp_path / f"{level}.png")
    assert check([GTFolder(tmp_path)], [], 2, 32).findings == []


# --- LQ -----------------------------------------------------------------------------------------------------------


def test_lq_made_in_another_way(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt", {f"{i}.png": (96, 80) for i in range(3)})
    lq = reduced(gt, tmp_path / "lq")
    for file in list_images(gt)[1:]:
        Image.open(file).resize((40, 48), Image.Resampling.BILINEAR).save(lq / file.name)
    report = check([PairedFolder(gt, lq)], [], 2, 32)
    other = find(report, "LQ of 2 of 3 compared pairs is not MATLAB bicubic, but antialiased bilinear")
    assert other.level == "warning" and names(other) == ["1.png", "1.png", "2.png", "2.png"]
    assert len(report.findings) == 1


def test_shifted_wrong_and_noisy_lq(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt", {f"{i}.png": (96, 128) for i in range(4)})
    lq = reduced(gt, tmp_path / "lq")
    moved = torch.roll(read_rgb(gt / "0.png"), (1, -1), (1, 2))
    save_image(to_image(imresize(moved, 0.5)), lq / "0.png")
    (lq / "2.png").write_bytes((lq / "1.png").read_bytes())
    noise = 12 * torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(0))
    save_image(to_image((read_rgb(lq / "3.png") + noise).clamp(0, 255).byte()), lq / "3.png")
    report = check([], [PairedFolder(gt, lq)], 2, 32)
    shifted = find(report, "shifted")
    assert "+0.50 LQ pixels down and -0.50 right" in shifted.message and names(shifted) == ["0.png", "0.png"]
    assert find(report, "does not show what GT shows").files == (gt / "2.png", lq / "2.png")
    unknown = find(report, "nor made in another way")
    assert unknown.level == "warning" and unknown.files == (gt / "3.png", lq / "3.png")
    assert len(report.findings) == 3 and not report.ok


def test_jpeg_lq_and_rounding(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt")
    lq = reduced(gt, tmp_path / "lq")
    Image.open(lq / "a.png").save(lq / "a.jpg", quality=90)
    (lq / "a.png").unlink()
    pixels = read_rgb(lq / "b.png")
    pixels[1, 2, 3] ^= 1
    save_image(to_image(pixels), lq / "b.png")
    report = check([PairedFolder(gt, lq)], [], 2, 32)
    assert names(find(report, "LQ in JPEG")) == ["a.jpg"]
    assert find(report, "is MATLAB bicubic but for its rounding").level == "note"


def test_pairs_are_sampled_evenly(make_pictures: MakePictures, tmp_path: Path) -> None:
    gt = make_pictures("gt", {f"{i}.png": (64, 64) for i in range(9)})
    lq = tmp_path / "lq"
    lq.mkdir()
    for file in list_images(gt):
        Image.open(file).resize((32, 32), Image.Resampling.BOX).save(lq / file.name)
    report = check([PairedFolder(gt, lq)], [], 2, 32, max_pairs=3)
    assert "LQ of 3 of 9 pairs compared, spread evenly" in report.summary[0]
    assert names(find(report, "area"))[::2] == ["0.png", "3.png", "6.png"]


# --- other sets, real pictures --------------------------------------------------------------------------------------


def test_sets_of_other_kinds_are_asked_for_their_pictures(make_pictures: MakePictures) -> None:
    root = make_pictures("gt", {"a.png": (33, 40)})

    class Own(PictureSet):
        def find(self, scale: int) -> list[Picture]:
            return [Picture("a", root / "a.png", None, (33, 40), (32, 40))]

    assert [f.message for f in check([Own("own")], [], 2, 32).findings] == [
        "1 of 1 GT pictures are no multiple of scale 2, and are cropped"
    ]


@pytest.mark.skipif(not SET5.is_dir(), reason="needs Set5 in ../shared/data/benchmarks")
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_set5_is_matlab_bicubic(scale: int) -> None:
    report = check([], [BenchmarkFolder(SET5)], scale, 96)
    assert report.summary[0].endswith("LQ of 5 of 5 pairs compared, spread evenly: 5 x MATLAB bicubic, bit for bit")
    assert report.ok and all("cropped" in f.message for f in report.findings)


@pytest.mark.skipif(not SET5.is_dir(), reason="needs Set5 in ../shared/data/benchmarks")
def test_set5_reduced_by_pil_is_called_so(tmp_path: Path) -> None:
    for file in list_images(SET5 / "HR"):
        image = Image.open(file)
        image = image.crop((0, 0, image.width // 2 * 2, image.height // 2 * 2))
        image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC).save(tmp_path / file.name)
    report = check([], [PairedFolder(SET5 / "HR", tmp_path)], 2, 96)
    assert [f.message for f in report.findings] == [
        "LQ of 5 of 5 compared pairs is not MATLAB bicubic, but antialiased bicubic of PIL or PyTorch (bit for bit)"
    ]
