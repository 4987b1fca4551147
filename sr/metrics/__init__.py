"""PSNR and SSIM by the protocols of super-resolution papers, as functions and as torchmetrics classes."""

from sr.metrics.fidelity import PSNR, SSIM
from sr.metrics.functional import psnr, psnr_and_ssim, ssim
from sr.metrics.protocols import PROTOCOLS, Protocol

__all__ = ["PROTOCOLS", "PSNR", "SSIM", "Protocol", "psnr", "psnr_and_ssim", "ssim"]
