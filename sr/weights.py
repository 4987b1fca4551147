"""Weights known by name: those installed with the package, and published ones, which are downloaded when asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sr.errors import SRError
from sr.registry import did_you_mean

_FOLDER = Path(__file__).parent / "pretrained"
NO_LICENCE = "none stated"

Scores = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class PretrainedWeights:
    """Record of one weights file.

    Attributes:
        name: ``model_xSCALE.recipe``, what :func:`sr.load` takes.
        arch: name of the architecture's class.
        scale: output edge / input edge.
        sha256: of the file.
        size: of the file, in bytes.
        licence: of the weights, as an SPDX expression, or ``none stated``.
        recipe: the config that made it, or where it was published.
        data: what it was trained on, where that is known.
        metrics: data set -> (PSNR_Y in dB, SSIM_Y), measured by the protocol of :mod:`sr.metrics`.
        paper: the same as its authors print them.
        url: where it is downloaded from; empty if it is installed.
    """

    name: str
    arch: str
    scale: int
    sha256: str
    size: int
    licence: str
    recipe: str
    data: str = ""
    metrics: Scores = field(default_factory=dict)
    paper: Scores = field(default_factory=dict)
    url: str = ""

    @property
    def model(self) -> str:
        """The name for :func:`sr.create_model`."""
        return self.name.rpartition("_x")[0]

    @property
    def path(self) -> Path:
        """Where the file lies, or will once it is downloaded: the cache is ``$XDG_CACHE_HOME/sr/weights``."""
        if not self.url:
            return _FOLDER / f"{self.name}.safetensors"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "sr" / "weights" / f"{self.name}.pth"

    def obtain(self) -> Path:
        """The file, downloaded and checked if need be.

        Raises:
            SRError: it is not here and cannot be downloaded, or what arrives is another file.
        """
        if not self.url:
            if not self.path.is_file():
                raise SRError(f"the installed weights {self.name} are missing ({self.path}); install the package again")
            return self.path
        from sr.fetch import FetchError, fetch  # here: what it imports would slow down every start

        try:
            return fetch(self.url, self.path, size=self.size, sha256=self.sha256, attempts=3)
        except FetchError as e:
            raise SRError(f"{self.name}: {e}\nOr put that file, got in another way, at {self.path}") from e


def _published(
    name: str,
    repository: str,
    sha256: str,
    size: int,
    arch: str,
    licence: str,
    paper: Scores,
    metrics: Scores,
    data: str = "",
) -> PretrainedWeights:
    """A record of a file on GitHub; ``repository``: ``owner/name@commit/path``."""
    place, _, path = repository.partition("@")
    return PretrainedWeights(
        name=name,
        arch=arch,
        scale=int(name.rpartition("_x")[2].partition(".")[0]),
        sha256=sha256,
        size=size,
        licence=licence,
        recipe=f"https://github.com/{place}",
        data=data,
        metrics=metrics,
        paper=paper,
        url=f"https://raw.githubusercontent.com/{place}/{path}",
    )


def _scores(*values: float) -> Scores:
    """PSNR_Y and SSIM_Y on Set5, then Set14, then B100, as far as they go."""
    return dict(zip(("Set5", "Set14", "B100"), zip(values[::2], values[1::2], strict=True), strict=False))


def _photos(model: str, sha256: str, size: int, metrics: Scores) -> PretrainedWeights:
    """A record of a SparseSR (``sparsesr_s_x2``) that was trained on photographs and is installed with the package."""
    return PretrainedWeights(
        name=f"{model}.photos",
        arch="SparseSR",
        scale=int(model.rpartition("_x")[2]),
        sha256=sha256,
        size=size,
        licence="Apache-2.0",
        recipe="configs/sparsesr_s_photos.yaml",
        data="383 openly licensed photographs; their sources are in the file's metadata",
        metrics=metrics,
    )


_IMDN = "Zheng222/IMDN@f8a43074c7c8ea33ea7c33ce43a698c086007fd0/checkpoints"
_RLFN = "bytedance/RLFN@bccfde91bf8b2de80789ec033a029e6f2a932330/model_zoo"
_BSRN = "xiaom233/BSRN@5c862348954153f10046be5718c71a4d07fbf031/experiments/pretrained_models"
_SMFANET = "Zheng-MJ/SMFANet@b3ac071264c64daebb06e304e161a9b3d32d2e5f/pretrain"
_PAN = "zhaohengyuan1/PAN@a20974545cf011c386d728739d091c39e23d0686/experiments/pretrained_models"

# The first installed one of a scale is the default for that scale; the first of all is what upscale.py uses.
PRETRAINED: dict[str, PretrainedWeights] = {
    record.name: record
    for record in (
        _photos(
            "sparsesr_s_x2",
            "ad5531b4cbb79bb0f4d0701b015cee9cca95109128f37d329a2c66e888e6b6b1",
            1488400,
            _scores(37.787, 0.9600, 33.373, 0.9159, 32.012, 0.8976),
        ),
        _photos(
            "sparsesr_s_x3",
            "ab7945c5cd50a875bf5ab430acf233c714da3e929395b22882a26e8d891f2bd7",
            1514380,
            _scores(33.965, 0.9243, 30.087, 0.8370, 28.909, 0.8007),
        ),
        _photos(
            "sparsesr_s_x4",
            "372172c8d0c96912ed53c1fbb00fb4ca1f60608db8a48f14e33738862934a119",
            1550752,
            _scores(31.840, 0.8905, 28.394, 0.7763, 27.422, 0.7305),
        ),
        _photos(
            "sparsesr_t_x2",
            "591f1dbbb396b545269ca74361696193ff24b53ea4b2e6073940133ef58333a1",
            699992,
            _scores(37.534, 0.9590, 33.137, 0.9140, 31.845, 0.8957),
        ),
        _photos(
            "sparsesr_t_x3",
            "25b8e063519cb7ac44e3e85df5845f33e1fbbd93fc542a8b0fce3a4e52831f40",
            717372,
            _scores(33.712, 0.9219, 29.923, 0.8340, 28.799, 0.7980),
        ),
        _photos(
            "sparsesr_t_x4",
            "815dec43f0adb1e90cf02e46306e8e50163f0dceef62cb420d126badc4d6638b",
            741648,
            _scores(31.505, 0.8852, 28.216, 0.7720, 27.306, 0.7270),
        ),
        PretrainedWeights(
            name="sparsesr_t_x2.quickstart",
            arch="SparseSR",
            scale=2,
            sha256="20c63a31ea59dc2cf2fb7ac1350650f589e5d7154cdad8d4fbecfa4120ccdc44",
            size=696552,
            licence="Apache-2.0",
            recipe="configs/quickstart.yaml",
            data="datasets/sample/train (CC0 and CC-BY photographs, datasets/sample/LICENCES.csv)",
            metrics={"Set5": (37.015, 0.9564), "Set14": (32.665, 0.9097), "B100": (31.477, 0.8904)},
        ),
        _published(
            "smfanet_x4.df2k",
            f"{_SMFANET}/SMFANet_DF2K_100w_x4SR.pth",
            "3141324e9ef6ebdd2338566b30ad034a3bf0c3c34e8030d4086ce4330c319402",
            850199,
            "SMFANet",
            "Apache-2.0",
            _scores(32.25, 0.8956, 28.71, 0.7833, 27.64, 0.7377),
            _scores(32.252, 0.8956, 28.705, 0.7833, 27.641, 0.7379),
            "DF2K",
        ),
        _published(
            "smfanet_plus_x2.df2k",
            f"{_SMFANET}/SMFANet_plus_DF2K_100w_x2SR.pth",
            "a52ba55ccec8f08cc2c354fdccfe0f7647ea70cc5a47a096b70269370a4f5c5c",
            2016933,
            "SMFANet",
            "Apache-2.0",
            _scores(38.19, 0.9611, 33.92, 0.9207, 32.32, 0.9015),
            _scores(38.185, 0.9611, 33.916, 0.9207),
            "DF2K",
        ),
        _published(
            "smfanet_plus_x3.df2k",
            f"{_SMFANET}/SMFANet_plus_DF2K_100w_x3SR.pth",
            "509c2af8855e9424d5676956ff5f5911c4e6439c53064e7a4cdbe062ddf2a8d4",
            2042853,
            "SMFANet",
            "Apache-2.0",
            _scores(34.66, 0.9292, 30.57, 0.8461, 29.25, 0.8090),
            _scores(34.665, 0.9292, 30.568, 0.8461, 29.263, 0.8091),
            "DF2K",
        ),
        _published(
            "smfanet_plus_x4.df2k",
            f"{_SMFANET}/SMFANet_plus_DF2K_100w_x4SR.pth",
            "28a807e1ee1f46a990458efd813654ea0ba023148a8423e49847d9b5c4f98ca3",
            2079269,
            "SMFANet",
            "Apache-2.0",
            _scores(32.51, 0.8985, 28.87, 0.7872, 27.74, 0.7412),
            _scores(32.511, 0.8985, 28.866, 0.7872, 27.750, 0.7414),
            "DF2K",
        ),
        _published(
            "rlfn_s_x2.published",
            f"{_RLFN}/rlfn_s_x2.pth",
            "f5175f499f869c1b884c2552a1bcd6abd07ab352e3d8c8c9abe31b1deb60fe45",
            1855005,
            "RLFN",
            "Apache-2.0",
            _scores(38.05, 0.9607, 33.68, 0.9172, 32.19, 0.8997),
            _scores(38.047, 0.9607, 33.622, 0.9174),
        ),
        _published(
            "rlfn_x4.published",
            f"{_RLFN}/rlfn_x4.pth",
            "8c7edb57dfc89048bafba29d591d4c27d4099964b4a9e22df23d6dc257a637c0",
            2212893,
            "RLFN",
            "Apache-2.0",
            _scores(32.24, 0.8952, 28.62, 0.7813, 27.60, 0.7364),
            _scores(32.238, 0.8953, 28.620, 0.7814, 27.605, 0.7364),
        ),
        _published(
            "bsrn_x2.published",
            f"{_BSRN}/net_g_BSRN_x2.pth",
            "09bd1f85e017c7902e65a9c9770ee592efe3d013f6b5cf1fe7de8cabac4ba37d",
            1441677,
            "BSRN",
            "MIT",
            _scores(38.10, 0.9610, 33.74, 0.9193, 32.24, 0.9006),
            _scores(38.083, 0.9608, 33.730, 0.9193),
        ),
        _published(
            "bsrn_x4.published",
            f"{_BSRN}/net_g_BSRN_x4.pth",
            "47518e0f549f5696da0c84ca2d65bf50d789c7ac20e621909f5fd6c8c8d70bcb",
            1524813,
            "BSRN",
            "MIT",
            _scores(32.35, 0.8966, 28.73, 0.7847, 27.65, 0.7387),
            _scores(32.349, 0.8965, 28.735, 0.7847, 27.648, 0.7386),
        ),
        _published(
            "imdn_x2.published",
            f"{_IMDN}/IMDN_x2.pth",
            "740b39653592bd3f49955a21cd9e16f2d37f2c413368cc09327601b8fbe42ce1",
            2796052,
            "IMDN",
            NO_LICENCE,
            _scores(38.00, 0.9605, 33.63, 0.9177, 32.19, 0.8996),
            _scores(37.996, 0.9605, 33.627, 0.9177),
        ),
        _published(
            "imdn_x4.published",
            f"{_IMDN}/IMDN_x4.pth",
            "e660c38221147217a136debeb99eb304d62d9c0f73ac421ed66281b619719714",
            2879112,
            "IMDN",
            NO_LICENCE,
            _scores(32.21, 0.8948, 28.58, 0.7811, 27.56, 0.7353),
            _scores(32.210, 0.8948, 28.582, 0.7811, 27.560, 0.7353),
        ),
        _published(
            "pan_x2.df2k",
            f"{_PAN}/PANx2_DF2K.pth",
            "fcf8ed48656abbaae46309ee91745684b80235a9c8b37a2d8fb0715a3ad3f00f",
            1076593,
            "PAN",
            NO_LICENCE,
            _scores(38.00, 0.9605, 33.59, 0.9181, 32.18, 0.8997),
            _scores(38.001, 0.9605, 33.593, 0.9181),
            "DF2K",
        ),
        _published(
            "pan_x4.df2k",
            f"{_PAN}/PANx4_DF2K.pth",
            "739fab99ee7b7058dab4d1b84aa2869bb9fc3995a1c08789c20355bee943833c",
            1121681,
            "PAN",
            NO_LICENCE,
            _scores(32.13, 0.8948, 28.61, 0.7822, 27.59, 0.7363),
            _scores(32.131, 0.8948, 28.611, 0.7822, 27.598, 0.7365),
            "DF2K",
        ),
    )
}


def list_weights() -> list[str]:
    """Names of all known weights, installed and published, sorted."""
    return sorted(PRETRAINED)


def find_weights(name: str) -> PretrainedWeights:
    """The record called ``name``; ``model_xSCALE`` alone finds that network's recipe of the highest PSNR on Set5."""
    if name in PRETRAINED:
        return PRETRAINED[name]
    recipes = [record for record in PRETRAINED.values() if record.name.split(".")[0] == name]
    if recipes:
        return max(recipes, key=lambda record: record.metrics.get("Set5", (0.0,))[0])
    raise SRError(
        f"{name!r} is neither a file nor the name of known weights{did_you_mean(name, PRETRAINED)}; "
        f"known: {', '.join(PRETRAINED)}"
    )


def default_weights(scale: float | None = None) -> PretrainedWeights:
    """The weights to use when none were named: the first installed ones of the smallest scale that is enough.

    Where none is, of the largest: the upscaler runs the network as often as it takes.
    """
    installed = [record for record in PRETRAINED.values() if not record.url]
    if scale is None:
        return installed[0]
    enough = [record.scale for record in installed if record.scale >= scale]
    best = min(enough) if enough else max(record.scale for record in installed)
    return next(record for record in installed if record.scale == best)
