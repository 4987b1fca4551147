"""Distances between what networks trained on ImageNet see in two pictures."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor, nn
from torchmetrics.image import LearnedPerceptualImagePatchSimilarity

from sr.errors import SRError
from sr.losses.base import Frozen, Loss

# Place of a convolution in torchvision's VGG19.features -> its weight in Real-ESRGAN.
_VGG19_LAYERS = {2: 0.1, 7: 0.1, 16: 1.0, 25: 1.0, 34: 1.0}  # conv1_2, conv2_2, conv3_4, conv4_4, conv5_4
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_BACKBONES: dict[str, Any] = {
    "vgg": tv.VGG16_Weights.IMAGENET1K_V1,
    "alex": tv.AlexNet_Weights.IMAGENET1K_V1,
    "squeeze": tv.SqueezeNet1_1_Weights.IMAGENET1K_V1,
}
# Smallest patch edge, in pixels, of which the last layer has something left.
_SMALLEST = {"vgg": 16, "alex": 31, "squeeze": 17}


class PerceptualLoss(Loss):
    """Weighted mean absolute differences of VGG19's features before activation, as Real-ESRGAN is trained with.

    Layers conv1_2, conv2_2, conv3_4, conv4_4 and conv5_4 with weights 0.1, 0.1, 1, 1 and 1. "Perceptual Losses for
    Real-Time Style Transfer and Super-Resolution" (Johnson et al., ECCV 2016); features before activation: "ESRGAN"
    (Wang et al., ECCVW 2018); layers and weights: "Real-ESRGAN" (Wang et al., ICCVW 2021).

    Args:
        weight: factor of the term in the sum.

    Raises:
        SRError: torchvision's weights are neither there nor to be downloaded.
    """

    name = "perceptual"
    mean: Tensor
    std: Tensor

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(weight)
        state = _read_weights(tv.VGG19_Weights.IMAGENET1K_V1, "PerceptualLoss")
        with torch.device("meta"):  # most of the network is a classifier that nobody needs
            features = tv.vgg19(init_weights=False).features
        features.load_state_dict(
            {key.removeprefix("features."): value for key, value in state.items() if key.startswith("features.")},
            assign=True,
        )
        self.vgg = Frozen(_Layers(features, list(_VGG19_LAYERS)))
        self.register_buffer("mean", torch.tensor(_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(1, 3, 1, 1), persistent=False)

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        _check_size(sr, 16, "PerceptualLoss")
        features = self.vgg((sr - self.mean) / self.std)
        with torch.no_grad():
            wanted = self.vgg((target - self.mean) / self.std)
        terms = zip(_VGG19_LAYERS.values(), features, wanted, strict=True)
        return torch.stack([weight * F.l1_loss(own, other) for weight, own, other in terms]).sum()


class LPIPSLoss(Loss):
    """Learned perceptual distance: differences of unit-length features, weighted as people judged them.

    "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (Zhang et al., CVPR 2018), version 0.1.

    Args:
        weight: factor of the term in the sum.
        net: where the features come from; its authors advise ``vgg`` for training, and ``alex`` for measuring.

    Raises:
        SRError: torchvision's weights are neither there nor to be downloaded.
    """

    name = "lpips"

    def __init__(self, weight: float = 1.0, net: Literal["vgg", "alex", "squeeze"] = "vgg") -> None:
        super().__init__(weight)
        _read_weights(_BACKBONES[net], "LPIPSLoss")  # torchmetrics would unpickle the file without a look
        self.smallest = _SMALLEST[net]
        # The metric's network alone: the metric itself refuses what is not in [0, 1], as a network's output may be.
        self.lpips = Frozen(LearnedPerceptualImagePatchSimilarity(net_type=net).net)

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        _check_size(sr, self.smallest, "LPIPSLoss")
        distance: Tensor = self.lpips(2 * sr - 1, 2 * target - 1)
        return distance.mean()


class _Layers(nn.Module):
    """Outputs of some layers of a sequence.

    Args:
        layers: the sequence; ReLUs work in place no more, since they would activate the outputs.
        indices: of the layers whose outputs are given.
    """

    def __init__(self, layers: nn.Sequential, indices: list[int]) -> None:
        super().__init__()
        for layer in layers:
            if isinstance(layer, nn.ReLU):
                layer.inplace = False
        starts = [0, *(index + 1 for index in indices)]
        self.stages = nn.ModuleList(layers[a:b] for a, b in itertools.pairwise(starts))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs


def _check_size(sr: Tensor, smallest: int, who: str) -> None:
    if min(sr.shape[-2:]) < smallest:
        size = tuple(sr.shape[-2:])
        raise SRError(f"{who} needs patches of at least {smallest} pixels, not {size}; raise data.gt_size")


def _read_weights(weights: Any, who: str) -> dict[str, Tensor]:
    """Weights of torchvision (a member of one of its enums): from the cache of torch.hub, downloaded if missing."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    try:
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as e:
        what = "is damaged" if path.is_file() else f"is missing and cannot be downloaded ({e})"
        raise SRError(f"{who} needs {path}, which {what}; put the file from {weights.url} there") from e
    return state
