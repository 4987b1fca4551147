"""Curves read from logs, and drawn."""

from pathlib import Path

import pytest
from PIL import Image

from sr.errors import SRError
from sr.plots import plot_runs, read_log

LOG = """step,epoch,train/loss,val/Set5/psnr_y,lr-Adam
20,0,0.5,,0.1
40,0,0.25,,0.05
40,0,,31.5,
60,0,nan,,0.01
"""


def write(folder: Path, log: str = LOG) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(log)
    return folder


def test_a_log_becomes_curves(tmp_path: Path) -> None:
    curves = read_log(write(tmp_path / "run"))
    assert curves == {
        "train/loss": ([20, 40], [0.5, 0.25]),
        "val/Set5/psnr_y": ([40], [31.5]),
        "lr": ([20, 40, 60], [0.1, 0.05, 0.01]),
    }


def test_runs_are_drawn_over_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    long = "step,train/loss\n" + "".join(f"{i},{1 / i}\n" for i in range(1, 1003))
    runs = [write(tmp_path / "a"), write(tmp_path / "b", long)]
    plot_runs(list(runs), tmp_path / "one.png")
    plot_runs([runs[0]], tmp_path / "alone.png")
    one, alone = (Image.open(tmp_path / f"{name}.png").convert("RGB") for name in ("one", "alone"))
    assert one.size == alone.size and one.tobytes() != alone.tobytes()
    assert len(one.getcolors(2**24)) > 3  # not a blank sheet


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("step,train/loss\n", "holds no values yet"),
        ("a,b\n1,2\n", "no log of a run"),
        ("step,x\n1,text\n", "no log of"),
    ],
)
def test_faulty_logs_are_named(tmp_path: Path, log: str, message: str) -> None:
    with pytest.raises(SRError, match=message):
        read_log(write(tmp_path / "run", log))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SRError, match=r"no log of a run at .*metrics\.csv"):
        read_log(tmp_path)
    pytest.importorskip("matplotlib")
    with pytest.raises(SRError, match="cannot write"):
        plot_runs([write(tmp_path / "a")], tmp_path / "nowhere" / "x.png")


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "best.safetensors").write_bytes(bytes(range(128, 256)))
    with pytest.raises(SRError, match=r"no log of a run at .*best\.safetensors"):
        read_log(tmp_path / "best.safetensors")
