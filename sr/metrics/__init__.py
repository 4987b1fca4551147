"""PSNR and SSIM by the protocol of super-resolution papers, as functions and as torchmetrics classes."""

from sr.metrics.fidelity import PSNR, SSIM
from sr.metrics.functional import psnr, ssim

__all__ = ["PSNR", "SSIM", "psnr", "ssim"]
