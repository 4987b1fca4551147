"""How an LQ picture was made from its GT: by MATLAB's bicubic to the last bit, or by what comes closest; and shifts."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sr.resize import imresize

MATLAB = "MATLAB bicubic"
EXACT = f"{MATLAB}, bit for bit"
NEARLY = f"{MATLAB} within 1 of 255"
UNRELATED = "another picture"

_EDGE = 160  # LQ pixels of the window in which candidates are compared; a whole photograph would take minutes
_MARGIN = 16  # LQ pixels along a cut that candidates get wrong; two 8x8 blocks, beyond every kernel
_KNOWN = 40.0  # dB above which a candidate is taken for the truth; other kernels stay below on textured pictures
_SURE = 50.0  # dB above which nothing more is tried
_GAIN = 1.0  # dB by which a candidate with a free parameter has to be better
_EQUAL = 0.1  # dB of difference that prove nothing
_POOR = 25.0  # dB that noise of standard deviation 14 leaves
_RELATED = 0.5  # correlation below which two pictures have nothing to do with one another; strong noise leaves 0.7
_BAND = 0.2  # cycles per pixel up to which a shift shows in all reductions; aliasing hides it above


@dataclass(frozen=True)
class Reduction:
    """How an LQ picture seems to have been made.

    Attributes:
        kind: the closest candidate, in words. :data:`EXACT` and :data:`NEARLY` hold over the whole picture;
            :data:`UNRELATED` if LQ does not show what GT shows.
        psnr: of the picture against that candidate in dB; infinite if they are equal.
        shift: (down, right) in LQ pixels, by which the content is displaced against MATLAB's bicubic.
    """

    kind: str
    psnr: float
    shift: tuple[float, float] = (0.0, 0.0)

    @property
    def known(self) -> bool:
        """Whether the candidate is close enough to be the truth."""
        return self.psnr >= _KNOWN


class _Candidate(NamedTuple):
    kind: str
    picture: Tensor  # uint8 (3, h, w)
    shift: tuple[float, float] = (0.0, 0.0)
    margin: int = 0  # LQ pixels along the picture's own border in which it is not valid


def identify(lq: Tensor, gt: Tensor, scale: int) -> Reduction:
    """Find out how ``lq`` was made from ``gt``.

    Tried are MATLAB's and PIL's bicubic, Lanczos, bilinear and area; bicubic and bilinear without antialiasing, as
    OpenCV has them; every ``scale``-th pixel; and if none of these fits, MATLAB's bicubic of the displaced picture,
    Gaussian blur before bicubic or before leaving pixels out, and JPEG compression after any of the former.

    Args:
        lq: uint8 (3, h, w), RGB.
        gt: uint8 (3, scale*h, scale*w), RGB.
        scale: GT edge / LQ edge.
    """
    reference = imresize(gt, size=(lq.shape[-2], lq.shape[-1]))
    difference = int((lq.int() - reference.int()).abs().max())
    if difference <= 1:
        return Reduction(NEARLY if difference else EXACT, _psnr(lq, reference))
    moved = measure_shift(lq, reference)

    window = _Window(lq, gt, scale)
    plain = _plain_reductions(window.gt, scale)
    best, psnr = window.best(plain)
    if best.kind == MATLAB and psnr >= _SURE:  # then there may be more of a difference outside the window
        whole = _psnr(lq, reference)
        return Reduction(MATLAB if whole >= _KNOWN else f"{MATLAB} in parts", whole)
    for more in (_filtered_reductions(window.gt, scale, moved), window.jpegs(plain)):
        if psnr < _SURE:
            candidate, gain = window.best(more)
            if gain > psnr + _GAIN:
                best, psnr = candidate, gain
    if psnr >= _KNOWN:
        return Reduction(best.kind, psnr, best.shift)
    if psnr < _POOR and _correlation(lq, reference) < _RELATED:
        return Reduction(UNRELATED, psnr)
    return Reduction(best.kind, psnr, moved)


def measure_shift(lq: Tensor, reference: Tensor) -> tuple[float, float]:
    """Displacement of a picture's content against a reference, from the phases of their spectra.

    The peak of the phase correlation (C. D. Kuglin and D. C. Hines, "The phase correlation image alignment method",
    1975) gives whole pixels; a displacement by d turns the phase at frequency f by -2 pi f d, and a plane fitted to
    the low frequencies gives the rest.

    Args:
        lq: uint8 (3, h, w).
        reference: uint8 (3, h, w), the same content.

    Returns:
        (down, right) in pixels; (0, 0) for pictures below 16 pixels, in which nothing can be measured.
    """
    if min(lq.shape[-2:]) < 16:
        return 0.0, 0.0
    a, b = (x.double().mean(0).numpy() for x in (lq, reference))
    cross = _cross_spectrum(a, b)
    peak = np.unravel_index(np.fft.ifft2(cross / np.maximum(np.abs(cross), 1e-9)).real.argmax(), a.shape)
    whole = [int(p) if p <= n // 2 else int(p) - n for p, n in zip(peak, a.shape, strict=True)]
    if all(abs(d) <= n // 2 - 8 for d, n in zip(whole, a.shape, strict=True)):
        for axis, d in enumerate(whole):
            length = a.shape[axis] - abs(d)
            a = a.take(range(max(d, 0), max(d, 0) + length), axis)
            b = b.take(range(max(-d, 0), max(-d, 0) + length), axis)
        cross = _cross_spectrum(a, b)
    else:  # hardly any overlap, so that it is chance
        whole = [0, 0]
    f = np.stack(np.meshgrid(*(np.fft.fftfreq(n) for n in a.shape), indexing="ij"), -1)
    low = np.hypot(f[..., 0], f[..., 1]) < _BAND
    f, cross = f[low], cross[low]
    weight = np.abs(cross) ** 0.25  # the loudest few frequencies would drown the others
    rest = np.zeros(2)
    for _ in range(3):  # what is left is smaller each time, and with it the noise from phases that wrap
        phase = np.angle(cross * np.exp(2j * np.pi * (f @ rest)))
        rest -= np.linalg.lstsq(2 * np.pi * f * weight[:, None], phase * weight, rcond=None)[0]
    return float(whole[0] + rest[0]), float(whole[1] + rest[1])


def _cross_spectrum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of two pictures without their mean, faded out towards the border."""
    fade = np.hanning(a.shape[0] + 2)[1:-1, None] * np.hanning(a.shape[1] + 2)[1:-1]
    fa, fb = (np.fft.fft2(fade * (x - np.average(x, weights=fade))) for x in (a, b))
    return fa * fb.conj()


class _Window:
    """The part of a pair in which candidates are compared: at the top, where the border tells PIL from MATLAB.

    Args:
        lq, gt, scale: as for :func:`identify`.
    """

    def __init__(self, lq: Tensor, gt: Tensor, scale: int) -> None:
        height, width = (min(_EDGE, n) for n in lq.shape[-2:])
        detail = lq[:, :height].float().diff(dim=-1).abs().sum((0, 1)).cumsum(0)
        starts = range(0, lq.shape[-1] - width + 1, 16)  # JPEG's blocks stay where they are
        left = max(starts, key=lambda x: float(detail[x + width - 2] - detail[x])) if width > 1 else 0
        right = left + width
        self.lq = lq[:, :height, left:right]
        self.gt = gt[:, : height * scale, left * scale : right * scale].contiguous()
        self.cuts = (0, height < lq.shape[-2], left > 0, right < lq.shape[-1])  # top, bottom, left, right

    def best(self, candidates: Iterable[_Candidate]) -> tuple[_Candidate, float]:
        """The candidate of the highest PSNR, and this; of almost equal ones the first."""
        scored = [(c, self._score(c)) for c in candidates]
        top = max(score for _, score in scored)
        return next(pair for pair in scored if pair[1] >= top - _EQUAL)

    def jpegs(self, plain: list[_Candidate]) -> Iterator[_Candidate]:
        """The best JPEG-compressed version of each candidate."""
        for candidate in plain:
            for subsampling in (0, 2):
                coarse = {q: self._score(_jpeg(candidate, q, subsampling)) for q in range(10, 100, 5)}
                centre = max(coarse, key=lambda q: coarse[q])
                yield self.best(_jpeg(candidate, q, subsampling) for q in range(centre - 4, centre + 5))[0]

    def _score(self, candidate: _Candidate) -> float:
        top, bottom, left, right = (max(_MARGIN * cut, candidate.margin) for cut in self.cuts)
        h, w = self.lq.shape[-2:]
        keep = (slice(None), slice(top, h - bottom), slice(left, w - right))
        if top + bottom >= h or left + right >= w:
            return -math.inf
        return _psnr(self.lq[keep], candidate.picture[keep])


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's, 0 if one of the two is flat."""
    x, y = (t.double() - t.double().mean() for t in (x, y))
    norm = (x.norm() * y.norm()).item()
    return (x * y).sum().item() / norm if norm else 0.0


def _psnr(x: Tensor, y: Tensor) -> float:
    error = (x.double() - y.double()).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def _plain_reductions(gt: Tensor, scale: int) -> list[_Candidate]:
    """The ways without a parameter; those that cannot be told apart at this scale have one name."""
    size = (gt.shape[-2] // scale, gt.shape[-1] // scale)
    image = Image.fromarray(gt.permute(1, 2, 0).contiguous().numpy())

    def by_pillow(how: Image.Resampling) -> Tensor:
        return _tensor(image.resize((size[1], size[0]), how))

    def by_torch(mode: str) -> Tensor:
        return _round(F.interpolate(gt[None].float(), size, mode=mode)[0])

    every = [
        _Candidate(MATLAB, imresize(gt, size=size)),
        _Candidate("antialiased bicubic of PIL or PyTorch", by_pillow(Image.Resampling.BICUBIC)),
        _Candidate("antialiased Lanczos", by_pillow(Image.Resampling.LANCZOS)),
        _Candidate("antialiased bilinear", by_pillow(Image.Resampling.BILINEAR)),
        _Candidate("area (mean of the pixels)", by_torch("area")),
        _every_nth("nearest (first of the pixels)", gt, scale, 0),
        _every_nth("nearest (middle one of the pixels)", gt, scale, scale // 2),
        _Candidate("bicubic without antialiasing, as OpenCV's", by_torch("bicubic")),
        _Candidate("bilinear without antialiasing, as OpenCV's", by_torch("bilinear")),
    ]
    distinct: list[_Candidate] = []
    for candidate in every:
        same = next((i for i, c in enumerate(distinct) if torch.equal(c.picture, candidate.picture)), None)
        if same is None:
            distinct.append(candidate)
        else:
            distinct[same] = distinct[same]._replace(kind=f"{distinct[same].kind}, or {candidate.kind}")
    return distinct


def _every_nth(kind: str, gt: Tensor, scale: int, start: int, margin: int = 0) -> _Candidate:
    offset = ((scale - 1) / 2 - start) / scale  # of the pixel that is taken from the middle of those it stands for
    return _Candidate(kind, gt[:, start::scale, start::scale], (offset, offset), margin)


def _filtered_reductions(gt: Tensor, scale: int, moved: tuple[float, float]) -> Iterator[_Candidate]:
    """Reductions of the displaced and of the blurred GT."""
    size = (gt.shape[-2] // scale, gt.shape[-1] // scale)
    spectrum = torch.fft.rfft2(gt.float())
    fy = torch.fft.fftfreq(gt.shape[-2])[:, None]
    fx = torch.fft.rfftfreq(gt.shape[-1])

    def filtered(response: Tensor) -> Tensor:
        return _round(torch.fft.irfft2(spectrum * response, gt.shape[-2:]))

    down, right = moved
    turn = torch.exp(-2j * math.pi * scale * (fy * down + fx * right))
    margin = 8 + math.ceil(max(abs(down), abs(right)))
    yield _Candidate(MATLAB, imresize(filtered(turn), size=size), moved, margin)
    for sigma in np.arange(0.4, 4.1, 0.2):
        blurred = filtered(torch.exp(-2 * (math.pi * sigma) ** 2 * (fy**2 + fx**2)))
        name = f"Gaussian blur of sigma {sigma:.1f} before "
        yield _Candidate(name + MATLAB, imresize(blurred, size=size), margin=8)
        for start in sorted({0, scale // 2}):
            yield _every_nth(name + f"taking 1 of {scale} pixels", blurred, scale, start, 8)


def _jpeg(candidate: _Candidate, quality: int, subsampling: int) -> _Candidate:
    file = io.BytesIO()
    Image.fromarray(candidate.picture.permute(1, 2, 0).contiguous().numpy()).save(
        file, "JPEG", quality=quality, subsampling=subsampling
    )
    return candidate._replace(
        kind=f"{candidate.kind}, then JPEG of quality {quality}", picture=_tensor(Image.open(file))
    )


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _round(x: Tensor) -> Tensor:
    return (x + 0.5).floor().clamp(0, 255).to(torch.uint8)
