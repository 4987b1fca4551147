"""Weights for several scales in a given time."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import sr

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import train_scales


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_scales.py", "--config", "tiny.yaml", *args])
    train_scales.main()


def test_each_scale_starts_from_the_first_and_a_finished_one_is_not_done_again(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_scales, "_WARM_UP", 1)
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    args = ("--minutes", "0.001", "--scales", "3", "--probe", "1")
    run(monkeypatch, *args)
    assert "starting from weights/tiny_x2.safetensors" in capsys.readouterr().out
    for scale in (2, 3):
        assert sr.load(f"weights/tiny_x{scale}.safetensors").scale == scale
    run(monkeypatch, *args)
    assert capsys.readouterr().out.splitlines() == [f"x{s}: weights/tiny_x{s}.safetensors" for s in (2, 3)]
    # a run that was stopped is continued
    checkpoint = Path("weights/runs/tiny_x3/001/checkpoints/last.ckpt")
    before = checkpoint.stat().st_mtime_ns
    Path("weights/tiny_x3.safetensors").unlink()
    run(monkeypatch, *args)
    assert sr.load("weights/tiny_x3.safetensors").scale == 3
    assert checkpoint.stat().st_mtime_ns > before
    assert not Path("weights/runs/tiny_x3/002").exists()


@pytest.mark.parametrize("args", [("--minutes", "0"), ("--minutes", "1", "--probe", "0")])
def test_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    with pytest.raises(sr.SRError, match="larger than 0"):
        run(monkeypatch, *args)


def test_a_config_without_scale_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text("model: {}")
    with pytest.raises(sr.SRError, match="scale"):
        run(monkeypatch, "--minutes", "1")
