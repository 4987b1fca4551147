"""Loss terms: one class each, picked and weighted in the config by class path."""

from sr.losses.base import Loss
from sr.losses.pixel import FFTL1Loss, L1Loss

__all__ = ["FFTL1Loss", "L1Loss", "Loss"]
