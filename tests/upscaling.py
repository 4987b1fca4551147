"""Runs scripts/upscale.py in a test's own process, with a network whose every value is known."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import sr
from sr.errors import run_script
from sr.network import SRNetwork

SCRIPT = Path(__file__).parents[1] / "scripts" / "upscale.py"


class Nearest(SRNetwork):
    """Repeats pixels: its result is known without computing it."""

    receptive_field = 0

    def __init__(self, *, scale: int = 2, in_channels: int = 3, multiple_of: int = 1) -> None:
        super().__init__(scale=scale, in_channels=in_channels)
        self.multiple_of = multiple_of

    def upscale(self, lq):
        return lq.repeat_interleave(self.scale, -2).repeat_interleave(self.scale, -1)


class Result(SimpleNamespace):
    """What a command left behind."""

    status: int
    out: str
    err: str


class Command:
    """The command in this process, in a fresh folder, with :class:`Nearest` for whatever model is asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sr, "load", lambda name: Nearest())
        self._script, self._capsys = runpy.run_path(str(SCRIPT)), capsys

    def __call__(self, *args: object) -> Result:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_script(lambda: self._script["main"](self._script["parse"]([str(a) for a in args])))
        captured = self._capsys.readouterr()
        return Result(status=end.value.code, out=captured.out, err=captured.err)


def save(name: str, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> np.ndarray:
    """A picture of noise, written as ``name``; gives its pixels."""
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
    shape = (size[1], size[0], channels) if channels > 1 else (size[1], size[0])
    pixels = np.random.default_rng(sum(os.fsencode(name))).integers(0, 256, shape, dtype=np.uint8)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(name)
    return pixels


def pixels_of(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def twice(pixels: np.ndarray) -> np.ndarray:
    return pixels.repeat(2, 0).repeat(2, 1)


def files(root: str | Path = ".") -> list[str]:
    """Every file under a folder, hidden ones too."""
    return sorted(p.relative_to(root).as_posix() for p in Path(root).rglob("*") if p.is_file())
