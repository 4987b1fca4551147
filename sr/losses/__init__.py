"""Loss terms: one class each, picked and weighted in the config by class path."""

from sr.losses.adversarial import Adversarial
from sr.losses.base import Loss
from sr.losses.discriminator import UNetDiscriminator
from sr.losses.distillation import DistillationLoss
from sr.losses.perceptual import LPIPSLoss, PerceptualLoss
from sr.losses.pixel import CharbonnierLoss, FFTL1Loss, L1Loss, SSIMLoss

__all__ = [
    "Adversarial",
    "CharbonnierLoss",
    "DistillationLoss",
    "FFTL1Loss",
    "L1Loss",
    "LPIPSLoss",
    "Loss",
    "PerceptualLoss",
    "SSIMLoss",
    "UNetDiscriminator",
]
