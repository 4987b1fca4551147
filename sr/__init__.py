"""Efficient image super-resolution: train small networks, upscale pictures with them."""

__version__ = "0.1.0"

import os

# How long a waiting OpenMP thread spins before it sleeps; must be set before torch is loaded. By default it spins so
# long that anything else on the same cores slows training many times over (plain residual network, a second training
# beside it: 810 ms a step with 100,000, 210 ms with this value); on a quiet machine nothing is lost (21 ms).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from sr.checkpoint import load, save
from sr.errors import SRError
from sr.inference import Upscaler
from sr.network import SRNetwork
from sr.registry import create_model, list_models

__all__ = ["SRError", "SRNetwork", "Upscaler", "create_model", "list_models", "load", "save"]
