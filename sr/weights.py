"""The weights that are installed with the package: what each file is and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sr.errors import SRError
from sr.registry import did_you_mean

_FOLDER = Path(__file__).parent / "pretrained"


@dataclass(frozen=True)
class PretrainedWeights:
    """Record of one weights file.

    Attributes:
        name: ``arch_xSCALE.recipe``, what :func:`sr.load` takes.
        scale: output edge / input edge.
        sha256: of the file.
        licence: of the weights, as an SPDX expression.
        recipe: the config that made it.
        data: what it was trained on.
        metrics: data set -> (PSNR_Y in dB, SSIM_Y), by the protocol of :mod:`sr.metrics`.
    """

    name: str
    scale: int
    sha256: str
    licence: str
    recipe: str
    data: str
    metrics: dict[str, tuple[float, float]]

    @property
    def path(self) -> Path:
        """Where the installed file lies."""
        return _FOLDER / f"{self.name}.safetensors"


# The first record of a scale is the default for that scale; the first of all is what upscale.py uses.
PRETRAINED: dict[str, PretrainedWeights] = {
    record.name: record
    for record in (
        PretrainedWeights(
            name="sparsesr_t_x2.quickstart",
            scale=2,
            sha256="20c63a31ea59dc2cf2fb7ac1350650f589e5d7154cdad8d4fbecfa4120ccdc44",
            licence="Apache-2.0",
            recipe="configs/quickstart.yaml",
            data="datasets/sample/train (CC0 and CC-BY photographs, datasets/sample/LICENCES.csv)",
            metrics={"Set5": (37.015, 0.9564), "Set14": (32.665, 0.9097), "B100": (31.477, 0.8904)},
        ),
    )
}


def find_weights(name: str) -> PretrainedWeights:
    """The record called ``name``; ``arch_xSCALE`` alone finds the first recipe of that network."""
    if name in PRETRAINED:
        return PRETRAINED[name]
    for record in PRETRAINED.values():
        if record.name.split(".")[0] == name:
            return record
    raise SRError(
        f"{name!r} is neither a file nor the name of installed weights{did_you_mean(name, PRETRAINED)}; "
        f"known: {', '.join(PRETRAINED)}"
    )


def default_weights(scale: int | None = None) -> PretrainedWeights:
    """The weights to use when none were named: the first for ``scale``, or the first of all."""
    for record in PRETRAINED.values():
        if scale is None or record.scale == scale:
            return record
    scales = sorted({record.scale for record in PRETRAINED.values()})
    raise SRError(f"no installed weights enlarge {scale} times (there are {scales}); name a file with -m")
