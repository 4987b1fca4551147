"""Degradations: what turns a batch of GT into LQ, composed in YAML (``configs/degradations``).

A :class:`Degradation` is called with a batch, a scale and a generator, and works on the whole batch on its own device.
"""

from sr.degradations.base import Bicubic, Degradation, Draws, Step
from sr.degradations.blur import Blur, Sharpen, Sinc
from sr.degradations.bsrgan import Halve, ScaledBlur, ScaledShrink
from sr.degradations.compose import Chain, Pipeline, RandomChoice, Shuffle
from sr.degradations.jpeg import JPEG
from sr.degradations.noise import GaussianNoise, PoissonNoise
from sr.degradations.resize import RandomResize, Resize

__all__ = [
    "JPEG",
    "Bicubic",
    "Blur",
    "Chain",
    "Degradation",
    "Draws",
    "GaussianNoise",
    "Halve",
    "Pipeline",
    "PoissonNoise",
    "RandomChoice",
    "RandomResize",
    "Resize",
    "ScaledBlur",
    "ScaledShrink",
    "Sharpen",
    "Shuffle",
    "Sinc",
    "Step",
]
