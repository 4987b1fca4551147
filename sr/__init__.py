"""Efficient image super-resolution: train small networks, upscale pictures with them."""

__version__ = "0.1.0"

from sr import process as _process  # noqa: F401  (first: it has to run before torch is loaded)

# isort: split
from sr.checkpoint import load, save
from sr.errors import SRError
from sr.inference import Upscaler
from sr.network import SRNetwork
from sr.registry import create_model, list_models

__all__ = ["SRError", "SRNetwork", "Upscaler", "create_model", "list_models", "load", "save"]
