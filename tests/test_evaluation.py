"""Scoring models of every kind: published values, the report's files, strips, and mistakes in one line."""

from __future__ import annotations

import csv
import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sr
from sr.data import find_pictures
from sr.errors import SRError
from sr.evaluation import BICUBIC, NetworkModel, PictureWriter, Score, evaluate, mean, open_models
from sr.image import read_rgb
from sr.metrics import PROTOCOLS, Protocol, psnr, ssim
from sr.network import SRNetwork
from sr.resize import imresize

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
SISR = PROTOCOLS["sisr-y"]
needs_data = pytest.mark.skipif(not (DATA / "peer_results").is_dir(), reason="needs ../shared/data")


class Nearest(SRNetwork):
    """Enlarges without interpolation, plus a bias, so that values are known and not those of an 8-bit picture."""

    def __init__(self, *, scale: int = 2, bias: float = 0.0) -> None:
        super().__init__(scale=scale)
        self.bias = bias

    def upscale(self, lq):
        return lq.repeat_interleave(self.scale, -1).repeat_interleave(self.scale, -2) + self.bias


def model(scale: int = 2, bias: float = 0.0, name: str = "nearest") -> NetworkModel:
    return NetworkModel(name, "test", sr.Upscaler(Nearest(scale=scale, bias=bias), device="cpu"))


@pytest.fixture
def evaluate_script(monkeypatch, capsys):
    """scripts/evaluate.py in this process: (status, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "scripts" / "evaluate.py"), run_name="__main__")
        out = capsys.readouterr()
        return int(caught.value.code or 0), out.out, out.err

    return run


# --- published values


@needs_data
@pytest.mark.parametrize(
    ("folder", "name", "scale", "expected"),
    [
        ("IMDN_x4", "Set5", 4, "32.210/0.8948"),
        ("IMDN_x4", "Set14", 4, "28.582/0.7811"),
        ("BSRN_x2", "Set5", 2, "38.083/0.9608"),
        ("SMFANet_plus_DF2K_x3", "Set5", 3, "34.665/0.9292"),
    ],
)
def test_pictures_of_published_models_have_their_published_scores(folder, name, scale, expected):
    bicubic_psnr = {"Set5": {2: 33.67, 3: 30.40, 4: 28.43}, "Set14": {4: 26.09}}[name][scale]
    models = open_models([str(DATA / "peer_results" / folder)])
    scores = list(evaluate(models, find_pictures(DATA / "benchmarks" / name, scale), [SISR]))
    own, cubic = (mean([p.scores[key][0] for p in scores]) for key in (folder, BICUBIC))
    assert f"{own.psnr:.3f}/{own.ssim:.4f}" == expected
    assert f"{cubic.psnr:.2f}" == f"{bicubic_psnr:.2f}"


@needs_data
def test_published_weights_have_their_published_scores():
    path = DATA / "weights" / "IMDN_x4.pth"
    try:
        models = open_models([str(path)], device="cpu")
    except SRError as e:
        pytest.skip(str(e))
    scores = list(evaluate(models, find_pictures(DATA / "benchmarks" / "Set5", 4), [SISR]))
    own = mean([p.scores["IMDN_x4"][0] for p in scores])
    assert own.psnr == pytest.approx(32.21, abs=0.02)
    assert own.ssim == pytest.approx(0.8948, abs=0.0005)


def test_bicubic_row_equals_matlab(tmp_path):
    """LR by MATLAB's imresize, the enlargement by MATLAB's imresize; the score of the two by an independent formula."""
    golden = np.load(ROOT / "tests" / "golden" / "matlab_protocol.npz")
    lq = golden["photo"][:20, :20]
    up = golden["photo_up4_uint8"]
    gt = np.roll(up, 1, axis=1)
    for folder, array in (("HR", gt), ("LR_bicubic/X4", lq)):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(array).save(tmp_path / folder / "photo.png")
    (scores,) = evaluate([], find_pictures(tmp_path, 4), [SISR])
    planes = [16 + (x[4:-4, 4:-4].astype(np.float64) @ [65.481, 128.553, 24.966]) / 255 for x in (up, gt)]
    expected = 10 * np.log10(255**2 / np.mean((planes[0] - planes[1]) ** 2))
    assert scores.scores[BICUBIC][0].psnr == pytest.approx(expected, abs=1e-9)


# --- scores


def test_scores_are_those_of_the_metrics_in_the_order_of_the_set(make_pictures):
    """Sizes differ, the largest is begun first, and each worker has its own copy of the network."""
    pictures = find_pictures(make_pictures("set", {"a.png": (24, 26), "b.png": (48, 60), "c.png": (33, 31)}), 2)
    protocols = [SISR, Protocol("raw", crop_border=0, test_y_channel=False, rounded=False)]
    network = Nearest(bias=0.001)
    upscaler = sr.Upscaler(network, device="cpu")
    before = torch.get_num_threads()
    results = list(evaluate([NetworkModel("m", "m", upscaler)], pictures, protocols))
    assert torch.get_num_threads() == before
    assert [r.name for r in results] == pictures.names == ["a", "b", "c"]
    for i, result in enumerate(results):
        lq, gt = pictures.pair(i)
        out = upscaler(lq / 255)[None]
        raw = {"crop_border": 0, "test_y_channel": False, "rounded": False}
        assert list(result.scores) == [BICUBIC, "m"]
        assert result.scores["m"][0].psnr == psnr(out, gt[None], crop_border=2).item()
        assert result.scores["m"][1].psnr == psnr(out, gt[None], **raw).item()
        assert result.scores["m"][1].ssim == ssim(out, gt[None], **raw).item()
        assert result.scores[BICUBIC][0].psnr == psnr(imresize(lq, 2)[None], gt[None], crop_border=2).item()
        assert not result.grey


@pytest.mark.parametrize("threads", [1, 5])
def test_scores_do_not_depend_on_the_number_of_threads(make_pictures, threads):
    pictures = find_pictures(make_pictures("set", ["a.png", "b.png", "c.png"]), 2)
    expected = list(evaluate([model()], pictures, [SISR]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert list(evaluate([model()], pictures, [SISR])) == expected
    finally:
        torch.set_num_threads(before)


def test_means_count_identical_pictures_and_pool_on_request():
    scores = [Score(30.0, 0.5, 100), Score(40.0, 0.7, 300), Score(math.inf, 1.0, 400)]
    plain = mean(scores)
    assert (plain.psnr, plain.identical) == (35.0, 1)
    assert plain.ssim == pytest.approx(2.2 / 3)
    error = (100 * 10**-3 + 300 * 10**-4) / 800  # of all 800 pixels
    assert mean(scores, pooled=True).psnr == pytest.approx(-10 * math.log10(error))
    assert mean(scores[2:]).psnr == math.inf


def test_pooling_weighs_pictures_by_their_pixels(make_pictures):
    pictures = find_pictures(make_pictures("set", {"a.png": (24, 26), "b.png": (48, 60)}), 2)
    results = list(evaluate([], pictures, [SISR]))
    errors, count = 0.0, 0
    weights = torch.tensor([65.481, 128.553, 24.966], dtype=torch.float64)
    for i in range(2):
        lq, gt = pictures.pair(i)
        y = [(torch.tensordot(weights, x.double(), 1) / 255)[2:-2, 2:-2] for x in (imresize(lq, 2), gt)]
        errors += (y[0] - y[1]).square().sum().item()
        count += y[0].numel()
    pooled = mean([r.scores[BICUBIC][0] for r in results], pooled=True)
    assert pooled.psnr == pytest.approx(10 * math.log10(255**2 * count / errors), abs=1e-9)


def test_grey_among_colour_is_scored_as_rgb_and_noted(make_pictures, evaluate_script):
    root = make_pictures("set", ["a.png"])
    Image.open(root / "a.png").convert("L").save(root / "grey.png")
    results = list(evaluate([model()], find_pictures(root, 2), [SISR]))
    assert [r.grey for r in results] == [False, True]
    status, out, _ = evaluate_script("--data", root, "--scale", 2)
    assert status == 0
    assert "set: grey: grey GT, scored as RGB with three equal channels" in out


# --- folders of ready pictures


def test_a_folder_is_read_back_with_the_same_scores(make_pictures, tmp_path):
    root = make_pictures("set", ["a.png", "sub/b.png"])
    pictures = find_pictures(root, 2)
    first = list(evaluate([model()], pictures, [SISR], on_picture=PictureWriter(tmp_path / "out", "set", 2)))
    (again,) = open_models([str(tmp_path / "out" / "x2" / "nearest")], [2])
    second = list(evaluate([again], pictures, [SISR]))
    assert first == second


def test_modcrop_cuts_all_results_alike(make_pictures, evaluate_script):
    root = make_pictures("set", {"a.png": (34, 41)})  # scored as 33 x 39 at x3
    pictures = find_pictures(root, 3)
    ready = make_pictures("ready_x3", {"a.png": (34, 41)})
    (folder,) = open_models([str(ready)])
    with pytest.raises(SRError, match=r"a\.png is 41x34, but its GT is 39x33; --modcrop cuts"):
        evaluate([folder], pictures, [SISR])
    (cut,) = evaluate([folder], pictures, [SISR], modcrop=True)
    gt, result = read_rgb(root / "a.png")[:, :33, :39], read_rgb(ready / "a.png")[:, :33, :39]
    assert cut.scores["ready_x3"][0].psnr == psnr(result[None], gt[None], crop_border=3).item()
    (far,) = open_models([str(make_pictures("far_x3", {"a.png": (36, 39)}))])
    for modcrop in (False, True):
        with pytest.raises(SRError, match=r"is 39x36, but its GT is 39x33$"):
            evaluate([far], pictures, [SISR], modcrop=modcrop)
    status, _, err = evaluate_script("-m", ready, "--data", root)
    assert status == 2 and err.count("\n") == 1 and "--modcrop" in err
    assert evaluate_script("-m", ready, "--data", root, "--modcrop")[0] == 0


# --- mistakes


def save_16_bit(path: Path, colour: bool) -> None:
    """Pillow writes no 16-bit colour, so the PNG is put together here."""
    if not colour:
        Image.fromarray(np.full((32, 40), 40_000, dtype=np.uint16)).save(path)
        return
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x9c\x40" * 3 * 40 for _ in range(32))
    header = struct.pack(">IIBBBBB", 40, 32, 16, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("name", ["grey.png", "colour.png", "grey.tif"])
def test_16_bit_gt_is_refused(make_pictures, name):
    root = make_pictures("set", ["a.png"])
    save_16_bit(root / name, name.startswith("colour"))
    with pytest.raises(SRError, match=rf"{name} has 16 bits a channel"):
        evaluate([], find_pictures(root, 2), [SISR])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "sparsesr_t_x2", "--data", "nowhere"], "nowhere does not exist"),
        (["-m", "sparsesr_t_x2", "--data", "set", "--scale", 3], "sparsesr_t_x2 enlarges 2 times, not 3"),
        (["--data", "set"], "give a scale"),
        (["-m", "ready", "--data", "set"], "ready does not say its scale"),
        (["-m", "ready", "--data", "set", "--scale", 2], "ready lacks 1 of 2 pictures of set: b"),
        (["-m", "none.onnx", "--data", "set"], "no ONNX file at none.onnx"),
        (["-m", "ready_x2", "-m", "ready_x2", "--data", "set"], "there is already a model 'ready_x2'"),
        (["--data", "set", "set", "--scale", 2], "two data sets have the same name"),
        (["--data", "set", "--scale", 2, "--crop-border", 16], "a crop of 16 pixels leaves nothing of set/a (40x32)"),
        (["--data", "set", "--scale", 2, "--save", "out", "--crop", 40, 0, 9, 9], "the crop at 40, 0 lies outside a"),
    ],
)
def test_mistakes_take_one_line(make_pictures, tmp_path, monkeypatch, evaluate_script, args, message):
    make_pictures("set", ["a.png", "b.png"])
    make_pictures("ready", ["a.png"])
    make_pictures("ready_x2", ["a.png", "b.png"])
    monkeypatch.chdir(tmp_path)
    status, _, err = evaluate_script(*args)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_model_that_makes_another_size_is_refused(make_pictures):
    class Odd(NetworkModel):
        def bind(self, pictures, modcrop=False):
            return lambda i, lq: torch.zeros(3, 30, 40, dtype=torch.uint8)

    pictures = find_pictures(make_pictures("set", ["a.png"]), 2)
    odd = Odd("odd", "odd", sr.Upscaler(Nearest(scale=2), device="cpu"))
    with pytest.raises(SRError, match="odd makes 40x30 of set/a, whose GT is 40x32"):
        list(evaluate([odd], pictures, [SISR]))


# --- the script and its files


def test_tables_files_and_gains(make_pictures, tmp_path, evaluate_script):
    sets = [make_pictures("one", ["a.png", "b.png"]), make_pictures("two", {"c.png": (48, 40)})]
    sr.save(sr.create_model("sparsesr_t", scale=2), tmp_path / "untrained.safetensors")
    ready = make_pictures("copies_x2", ["a.png", "b.png"])
    (ready / "c.png").write_bytes((sets[1] / "c.png").read_bytes())  # of the GT: infinite PSNR
    status, out, err = evaluate_script(
        *("-m", tmp_path / "untrained.safetensors", "-m", ready, "--data", *sets),
        *("--output", tmp_path / "results", "--save", tmp_path / "pictures"),
    )
    assert status == 0, err
    table = [[c.strip() for c in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert table[0] == ["model", "one [sisr-y]", "two [sisr-y]"]
    assert [row[0] for row in table[2:]] == ["bicubic", "untrained", "copies_x2"]
    assert table[4][2] == "inf/1.0000 (+inf)"
    assert "copies_x2 equals the GT in 1 pictures" in out
    assert "sisr-y: clamped, 8 bit, crop 2, MATLAB's Y, float64, mean of per-picture values." in out
    assert (tmp_path / "results" / "results.md").read_text().startswith("## x2")

    content = json.loads((tmp_path / "results" / "results.json").read_text())
    assert content["protocol"]["name"] == "sisr-y"
    one, two = content["results"]
    assert (one["protocol"], one["crop"], one["set"]) == ("sisr-y", 2, "one")
    own = [one["pictures"][name]["untrained"]["psnr"] for name in "ab"]
    assert one["means"]["untrained"]["psnr"] == pytest.approx(sum(own) / 2)
    gain = one["means"]["untrained"]["psnr"] - one["means"]["bicubic"]["psnr"]
    assert one["means"]["untrained"]["gain"] == pytest.approx(gain)
    assert f"({gain:+.3f})" in table[3][1]
    assert two["means"]["copies_x2"] == {"psnr": None, "ssim": pytest.approx(1), "gain": None, "identical": 1}

    rows = list(csv.DictReader((tmp_path / "results" / "results.csv").open()))
    assert len(rows) == 3 * 3
    row = next(r for r in rows if r["picture"] == "a" and r["model"] == "untrained")
    assert float(row["psnr"]) == own[0] and row["protocol"] == "sisr-y" and row["crop"] == "2"
    assert (tmp_path / "pictures" / "x2" / "untrained" / "one" / "a.png").is_file()
    assert (tmp_path / "pictures" / "x2" / "strips" / "two" / "c.png").is_file()


def test_one_table_per_scale_and_flags_in_the_name(make_pictures, evaluate_script):
    root = make_pictures("set", {"a.png": (48, 60)})
    status, out, _ = evaluate_script("--data", root, "--scale", 2, 3, "--protocol", "crop4-y", "--channels", "rgb")
    assert status == 0
    assert "## x2" in out and "## x3" in out
    assert out.count("set [crop4-y(test_y_channel=False)]") == 2
    assert "crop 4, RGB" in out


def test_why_prints_the_cell_of_every_protocol(make_pictures, evaluate_script):
    root = make_pictures("set", ["a.png", "b.png"])
    status, out, _ = evaluate_script("-m", "sparsesr_t_x2", "--data", root, "--why")
    assert status == 0
    rows = {cells[1].strip(): cells[2:] for line in out.splitlines() if len(cells := line.split("|")) == 7}
    assert len(rows) == 3 * 3 * 2 + 2  # and the header with its rule
    full = evaluate_script("-m", "sparsesr_t_x2", "--data", root, "--channels", "full-range-y", "--no-round")[1]
    assert f"| {rows['full-range Y, crop 2, not rounded'][2].strip()} (" in full
    pooled = evaluate_script("-m", "sparsesr_t_x2", "--data", root, "--pooled")[1]
    assert f"| {rows['MATLAB' + chr(39) + 's Y, crop 2, 8 bit'][3].strip()}/" in pooled


def test_perceptual_metrics_without_weights_stop_before_any_work(make_pictures, monkeypatch, evaluate_script):
    import torchvision

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", offline)
    status, out, err = evaluate_script("--data", make_pictures("set"), "--scale", 2, "--perceptual", "lpips")
    assert (status, out) == (2, "")
    assert "LPIPS needs torchvision's weights" in err
