"""What a degradation is, what it is made of, and where its random numbers come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sr.errors import SRError
from sr.resize import imresize

Range = tuple[float, float]


class Draws:
    """Random numbers of one call, and the sizes that steps aim at.

    Parameters (probabilities, widths, levels) come from the generator that the call was given; so do the seeds of
    fields of noise, which are made on the device of the pictures.

    Args:
        generator: on the CPU.
        device: where the pictures are.
        scale: GT edge / LQ edge.
        lq_size: (height, width) that the last step has to end with.

    Attributes:
        scale: the factor that is left; a step that shrinks all pictures ahead of the others lowers it.
        lq_size: as given.
        device: as given.
    """

    def __init__(self, generator: torch.Generator, device: torch.device, scale: int, lq_size: tuple[int, int]) -> None:
        self.generator, self.device, self.scale, self.lq_size = generator, device, scale, lq_size

    def uniform(self, n: int, low: float, high: float) -> Tensor:
        """(n,) numbers in [low, high), on the device of the pictures."""
        return torch.empty(n).uniform_(low, high, generator=self.generator).to(self.device)

    def integers(self, n: int, low: int, high: int) -> Tensor:
        """(n,) whole numbers from low to high, both included, as floats on the device of the pictures."""
        return torch.randint(low, high + 1, (n,), generator=self.generator).float().to(self.device)

    def odd(self, n: int, low: int, high: int) -> Tensor:
        """(n,) odd numbers from low to high, both odd and included, as floats on the device of the pictures."""
        return 2 * self.integers(n, low // 2, high // 2) + 1

    def choices(self, n: int, probabilities: Sequence[float]) -> Tensor:
        """(n,) indices into ``probabilities``, or its length with the probability that is missing to 1; on the CPU."""
        ends = torch.tensor(probabilities, dtype=torch.float64).cumsum(0)
        # Rounding must not leave a gap that no entry owns: 0.45 + 0.25 + ... may end just below 1.
        ends[ends > 1 - 1e-9] = 1
        return torch.searchsorted(ends, torch.rand(n, dtype=torch.float64, generator=self.generator), right=True)

    def number(self, low: float, high: float) -> float:
        """One number in [low, high), for the whole batch."""
        return float(torch.empty(()).uniform_(low, high, generator=self.generator))

    def choice(self, probabilities: Sequence[float]) -> int:
        """One index into ``probabilities``, for the whole batch."""
        return int(self.choices(1, probabilities))

    def order(self, n: int) -> list[int]:
        """The numbers from 0 to n - 1, shuffled."""
        return torch.randperm(n, generator=self.generator).tolist()

    def seeds(self, n: int) -> Tensor:
        """(n,) seeds for :func:`normal`, on the device of the pictures."""
        return torch.randint(2**62, (n,), generator=self.generator).to(self.device)


def normal(seeds: Tensor, *shape: int) -> Tensor:
    """Standard normal numbers on the device of ``seeds``, of which the first is used: one piece is one field."""
    generator = torch.Generator(seeds.device).manual_seed(int(seeds[0]))
    return torch.randn(shape, generator=generator, device=seeds.device)


class Step(ABC):
    """One operation on a batch; the parts of a :class:`Pipeline`."""

    @abstractmethod
    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        """Apply the step; ``x`` is left as it is.

        Args:
            x: (N, 3, H, W), RGB, float32, about [0, 1] (a filter may overshoot).
            draws: random numbers and sizes.

        Returns:
            (N, 3, H', W').
        """


class Degradation(ABC):
    """Turns a batch of GT into LQ. Subclasses write :meth:`degrade`."""

    @torch.no_grad()
    def __call__(self, gt: Tensor, scale: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Make the LQ of a batch, on its own device.

        Two calls with generators of the same state give the same pictures, bit for bit on a CPU. To preview a
        degradation, call it several times on one batch, with generators of different seeds.

        Args:
            gt: (N, 3, H, W), RGB, floating point in [0, 1]; H and W multiples of ``scale``.
            scale: GT edge / LQ edge.
            generator: source of all randomness, on the CPU whatever the device of ``gt``; it moves on.

        Returns:
            ``lq`` (N, 3, H / scale, W / scale), a multiple of 1/255 in [0, 1], and the GT to train towards: ``gt``
            itself, or sharpened where the degradation says so. Both float32, on the device of ``gt``.

        Raises:
            SRError: wrong shape or type, a size that ``scale`` does not divide, a generator that is not on the CPU.
        """
        if gt.dim() != 4 or gt.shape[1] != 3 or not gt.is_floating_point():
            raise SRError(f"a degradation takes float pictures (N, 3, H, W), not {gt.dtype} {tuple(gt.shape)}")
        height, width = gt.shape[-2:]
        if scale < 1 or height % scale or width % scale or not (height and width):
            raise SRError(f"pictures of {height} x {width} cannot become LQ at scale {scale}; use a multiple of it")
        if generator.device.type != "cpu":
            raise SRError("a degradation draws from a generator on the CPU; give it torch.Generator()")
        draws = Draws(generator, gt.device, scale, (height // scale, width // scale))
        with torch.autocast(gt.device.type, enabled=False):
            return self.degrade(gt.float(), draws)

    @abstractmethod
    def degrade(self, gt: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """(lq, gt) as for a call, with arguments that are checked."""


class Bicubic(Degradation):
    """MATLAB's bicubic of 8-bit pictures, as the LR pictures of the benchmarks are made; draws nothing."""

    def degrade(self, gt: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        pixels = (gt.clamp(0, 1) * 255).round().to(torch.uint8)
        return imresize(pixels, size=draws.lq_size).float() / 255, gt


def check_range(name: str, value: Sequence[float], low: float, high: float = float("inf")) -> Range:
    """The range as a tuple.

    Raises:
        SRError: not two numbers in order within [low, high].
    """
    if len(value) != 2 or not low <= value[0] <= value[1] <= high:
        bounds = f"of at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise SRError(f"{name} is two numbers {bounds}, the smaller one first, not {list(value)}")
    return (value[0], value[1])


def check_sizes(name: str, value: Sequence[int]) -> tuple[int, int]:
    """The range of kernel sizes as a tuple.

    Raises:
        SRError: not two odd numbers in order.
    """
    check_range(name, value, 1)
    if any(size % 2 != 1 for size in value):
        raise SRError(f"{name} is two odd numbers of pixels, not {list(value)}")
    return (value[0], value[1])


def check_probabilities(name: str, value: Sequence[float], complete: bool = True) -> list[float]:
    """The probabilities as a list.

    Raises:
        SRError: one is negative, or they do not add up to 1 (with ``complete=False``: to at most 1).
    """
    total = sum(value)
    if not value or min(value) < 0 or total > 1 + 1e-6 or (complete and total < 1 - 1e-6):
        raise SRError(f"{name} are probabilities that add up to {'1' if complete else 'at most 1'}, not {list(value)}")
    return list(value)
