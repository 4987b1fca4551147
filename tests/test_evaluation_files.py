"""Models that are files: results found by name, ONNX; and the strips that show results."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sr.data import find_pictures
from sr.errors import SRError
from sr.evaluation import Score, evaluate, open_models
from sr.evaluation.models import find_results
from sr.evaluation.strips import largest_difference, strip
from sr.inference import Upscaler
from sr.metrics import PROTOCOLS, Protocol, psnr
from sr.resize import imresize


@pytest.mark.parametrize(
    ("gt", "result"),
    [
        ("baby", "baby"),
        ("baby", "baby_x2"),
        ("baby", "babyx2_IMDN"),
        ("baby", "baby_IMDN_x2"),
        ("baby", "baby-IMDN"),
        ("img_001_SRF_2_HR", "img_001_SRF_2_IMDN"),
        ("img_001_SRF_2_HR", "img_001_SRF_2_HR_IMDN"),
        ("baby_HR_x2", "baby_SR_x2"),
        ("0801", "0801x2"),
        ("phonex2", "phonex2_x2_sr"),
    ],
)
def test_results_are_found_by_the_usual_names(make_pictures, gt, result):
    pictures = find_pictures(make_pictures("set", [f"{gt}.png", "other.png"]), 2)
    root = make_pictures("result", [f"{result}.webp", "other.png", "unrelated.png"])
    assert find_results(pictures, root) == [root / f"{result}.webp", root / "other.png"][:: 1 if gt < "other" else -1]


def test_numbers_and_longer_names_are_told_apart(make_pictures):
    pictures = find_pictures(make_pictures("set", ["im_1.png", "im_10.png", "im_1_b.png"]), 2)
    root = make_pictures("result", ["im_1_x2.png", "im_10_x2.png", "im_1_b_x2.png"])
    files = find_results(pictures, root)
    assert dict(zip(pictures.names, [f.stem for f in files], strict=True)) == {
        "im_1": "im_1_x2",
        "im_10": "im_10_x2",
        "im_1_b": "im_1_b_x2",
    }


def test_missing_ambiguous_and_wrongly_scaled_results_are_named(make_pictures):
    pictures = find_pictures(make_pictures("set", ["a.png", "b.png"]), 2)
    with pytest.raises(SRError, match=r"one lacks 1 of 2 pictures of set: b$"):
        find_results(pictures, make_pictures("one", ["a.png"]))
    with pytest.raises(SRError, match=r"lacks 2 of 2 .*: a, b \(there are pictures for x4\)"):
        find_results(pictures, make_pictures("other", ["a_x4.png", "b_x4.png"]))
    with pytest.raises(SRError, match=r"a_y\.png could both belong to a"):
        find_results(pictures, make_pictures("two", ["a_x.png", "a_y.png", "b.png"]))


# --- strips


def test_the_strip_shows_where_results_differ_most(make_pictures):
    gt = torch.zeros(3, 200, 240, dtype=torch.uint8)
    first, second = gt.clone(), gt.clone()
    second[:, 150:170, 30:50] = 90
    first[:, :60, 200:] = second[:, :60, 200:] = 255  # both equally wrong: no difference between them
    left, top, width, height = largest_difference(gt, {"a": first, "b": second}, edge=96)
    assert (width, height) == (96, 96)
    assert left <= 30 and left + 96 >= 50 and top <= 150 and top + 96 >= 170
    assert largest_difference(gt, {"a": first}, edge=40) == (200, 0, 40, 40)  # alone: against GT
    assert largest_difference(gt[:, :10, :20], {"a": first[:, :10, :20]}) == (0, 0, 20, 10)


def test_a_strip_holds_the_same_crop_of_each_picture():
    generator = torch.Generator().manual_seed(0)
    lq, gt = (
        torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in ((30, 40), (60, 80))
    )
    results = {"bicubic": imresize(lq, 2), "model": 255 - gt}
    scores = {name: Score(20.0, 0.5, 1) for name in results}
    image = strip(lq, gt, results, scores, 2, (10, 20, 48, 32))
    factor, gap = 4, 4  # 48 pixels are enlarged to 192
    panels = [lq.repeat_interleave(2, -1).repeat_interleave(2, -2), *results.values(), gt]
    assert image.size == (4 * 192 + 3 * gap, 32 * factor + 26)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    for i, panel in enumerate(panels):
        x = i * (192 + gap)
        shown = pixels[:, : 32 * factor : factor, x : x + 192 : factor]
        assert torch.equal(shown, panel[:, 20:52, 10:58])


# --- ONNX


def onnx_file(path: Path, scale: int = 2, edges: tuple = ("h", "w"), channels: int = 3, offset: float = 0.0) -> Path:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Resize", ["lq", "", "scales"], ["large"], mode="nearest", nearest_mode="floor",
                         coordinate_transformation_mode="asymmetric"),
        helper.make_node("Add", ["large", "offset"], ["sr"]),
    ]  # fmt: skip
    constants = [
        helper.make_tensor("scales", kind, [4], [1.0, 1.0, scale, scale]),
        helper.make_tensor("offset", kind, [1], [offset]),
    ]
    entry = helper.make_tensor_value_info("lq", kind, [1, channels, *edges])
    out = helper.make_tensor_value_info("sr", kind, [1, channels, None, None])
    graph = helper.make_graph(nodes, "nearest", [entry], [out], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_an_onnx_file_scores_what_it_makes(make_pictures, tmp_path):
    pictures = find_pictures(make_pictures("set", {"a.png": (24, 26), "b.png": (34, 40)}), 2)
    (model,) = open_models([str(onnx_file(tmp_path / "nearest.onnx", offset=0.001))], [2])
    raw = Protocol("raw", rounded=False)
    for protocols in ([PROTOCOLS["sisr-y"]], [PROTOCOLS["sisr-y"], raw]):
        for i, picture in enumerate(evaluate([model], pictures, protocols)):
            lq, gt = pictures.pair(i)
            made = (lq / 255).repeat_interleave(2, -1).repeat_interleave(2, -2) + 0.001
            for score, protocol in zip(picture.scores["nearest"], protocols, strict=True):
                expected = psnr(made[None], gt[None], crop_border=2, rounded=protocol.rounded).item()
                assert score.psnr == pytest.approx(expected, abs=1e-5)


def test_onnx_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(SRError, match=r"takes 48x32 pixels only; export it with dynamic height and width"):
        open_models([str(onnx_file(tmp_path / "fixed.onnx", edges=(32, 48)))])
    with pytest.raises(SRError, match="needs one float32 input"):
        open_models([str(onnx_file(tmp_path / "grey.onnx", channels=1))])
    with pytest.raises(SRError, match="enlarges 3 times, not 2"):
        open_models([str(onnx_file(tmp_path / "x3.onnx", scale=3))], [2])
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(SRError, match="damaged, or not an ONNX file"):
        open_models([str(tmp_path / "text.onnx")])


def test_onnx_without_onnxruntime_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SRError, match="pip install onnxruntime"):
        open_models([str(tmp_path / "a.onnx")])


def test_networks_are_scored_in_float32_on_any_device(monkeypatch):
    asked = []
    monkeypatch.setattr(Upscaler, "_dtype", lambda self, network, dtype: asked.append(dtype) or torch.float32)
    open_models(["sparsesr_t_x2"], [2])
    assert asked == [torch.float32]  # "auto" would be float16 on a GPU
