"""Efficient image super-resolution: train small networks, upscale pictures with them."""

__version__ = "0.1.0"
