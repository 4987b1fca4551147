"""Metrics that look through a trained network: LPIPS and DISTS, by torchmetrics, lower is better.

Their networks' weights are torchvision's, which downloads them to ``torch.hub.get_dir()`` when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchmetrics
import torchvision
from torch import Tensor, nn

from sr.errors import SRError
from sr.metrics.fidelity import PictureMean
from sr.metrics.functional import shave, to_8bit

_SMALLEST = 32  # both networks halve the picture four times


class _Perceptual(PictureMean):
    """Mean over pictures of a distance that a network measures between 8-bit RGB pictures.

    Args:
        crop_border: pixels to shave off each side.
        kwargs: passed on to :class:`torchmetrics.Metric`.

    Attributes:
        implementation: what computes it, with versions.

    Raises:
        SRError: torchmetrics is too old, or the weights are neither on this machine nor to be had.
    """

    higher_is_better = False
    implementation: str

    def __init__(self, *, crop_border: int = 0, **kwargs: Any) -> None:
        super().__init__(crop_border=crop_border, **kwargs)
        try:
            self.distance = self.make().eval().requires_grad_(False)
        except ImportError as e:
            raise SRError(f"{type(self).__name__} needs torchmetrics>=1.7: pip install -e '.[perceptual]'") from e
        except (OSError, RuntimeError) as e:  # no connection; or a file that is not what torchvision expects
            raise SRError(
                f"{type(self).__name__} needs torchvision's weights {self.weights().url} ({e});\n"
                f"they are neither in {torch.hub.get_dir()}/checkpoints nor to be had now; put the file there"
            ) from e
        self.implementation += f", torchmetrics {torchmetrics.__version__}, torchvision {torchvision.__version__}"

    @staticmethod
    def weights() -> Any:
        """torchvision's record of the weights."""
        raise TypeError("a subclass defines weights()")

    def make(self) -> nn.Module:
        """The network: (N, 3, H, W) twice, float32 in [0, 1] -> distances."""
        raise TypeError(f"{type(self).__name__} does not define make()")

    @torch.no_grad()
    def measure(self, sr: Tensor, gt: Tensor) -> Tensor:
        """Distance of each picture, (N,), float64."""
        if min(gt.shape[-2:]) - 2 * self.crop_border < _SMALLEST:
            raise SRError(f"{type(self).__name__} needs pictures of at least {_SMALLEST} pixels after cropping")
        a, b = (to_8bit(shave(x, self.crop_border)).expand(-1, 3, -1, -1).float() / 255 for x in (sr, gt))
        values = [self.distance(*pair).reshape(()) for pair in zip(a.split(1), b.split(1), strict=True)]
        return torch.stack(values).double()


class LPIPS(_Perceptual):
    """Learned perceptual image patch similarity with AlexNet, as its authors recommend for judging pictures.

    Zhang, Isola, Efros, Shechtman, Wang, "The unreasonable effectiveness of deep features as a perceptual metric",
    2018.
    """

    implementation = "LearnedPerceptualImagePatchSimilarity(net_type='alex')"

    @staticmethod
    def weights() -> Any:
        """torchvision's AlexNet."""
        return torchvision.models.AlexNet_Weights.DEFAULT

    def make(self) -> nn.Module:
        """torchmetrics' LPIPS without its bookkeeping."""
        from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

        return _OnePair(LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True))


class DISTS(_Perceptual):
    """Deep image structure and texture similarity.

    Ding, Ma, Wang, Simoncelli, "Image quality assessment: unifying structure and texture similarity", 2020.
    """

    implementation = "DISTSNetwork"

    @staticmethod
    def weights() -> Any:
        """torchvision's VGG-16."""
        return torchvision.models.VGG16_Weights.DEFAULT

    def make(self) -> nn.Module:
        """torchmetrics' network; its class builds it anew for every picture."""
        from torchmetrics.functional.image.dists import DISTSNetwork

        return DISTSNetwork()


class _OnePair(nn.Module):
    """The value of a torchmetrics metric for one pair, of which it remembers nothing."""

    def __init__(self, metric: torchmetrics.Metric) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, sr: Tensor, gt: Tensor) -> Tensor:
        value: Tensor = self.metric(sr, gt)
        self.metric.reset()
        return value


PERCEPTUAL: dict[str, Callable[..., _Perceptual]] = {"lpips": LPIPS, "dists": DISTS}
