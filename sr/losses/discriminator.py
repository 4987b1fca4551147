"""Networks that tell upscaled pictures from photographs.

Paper: "Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data" (Wang et al., ICCVW 2021),
section 3.3. Written from the description; no weights are taken over.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from sr.errors import SRError


class UNetDiscriminator(nn.Module):
    """A U-Net with spectral normalisation, which judges every pixel with what is around it.

    Args:
        features: channels at full resolution; each of three reductions doubles them.

    Raises:
        SRError: no features.
    """

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        if features < 1:
            raise SRError(f"features of the discriminator must be at least 1, not {features}")
        c = features
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.down = nn.ModuleList(
            spectral_norm(nn.Conv2d(c * k, c * k * 2, 4, stride=2, padding=1, bias=False)) for k in (1, 2, 4)
        )
        self.up = nn.ModuleList(spectral_norm(nn.Conv2d(c * k * 2, c * k, 3, padding=1, bias=False)) for k in (4, 2, 1))
        self.body = nn.ModuleList(spectral_norm(nn.Conv2d(c, c, 3, padding=1, bias=False)) for _ in range(2))
        self.last = nn.Conv2d(c, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Judge pictures.

        Args:
            x: (N, 3, H, W), RGB, nominally [0, 1], H and W at least 8.

        Returns:
            (N, 1, H, W), logits: positive where a pixel looks real.
        """
        x = F.leaky_relu(self.first(x.to(self.first.weight.dtype)), 0.2)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = F.leaky_relu(layer(x), 0.2)
        for layer in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = F.leaky_relu(layer(x), 0.2) + skip
        for layer in self.body:
            x = F.leaky_relu(layer(x), 0.2)
        logits: Tensor = self.last(x)
        return logits
