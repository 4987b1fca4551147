"""One file per network family; importing this package registers them all."""

from sr.archs.assanet import ASSANet, assanet_b, assanet_l, assanet_s
from sr.archs.external import SpandrelNetwork
from sr.archs.sparsesr import SparseSR, sparsesr_b, sparsesr_s, sparsesr_t

__all__ = [
    "ASSANet",
    "SpandrelNetwork",
    "SparseSR",
    "assanet_b",
    "assanet_l",
    "assanet_s",
    "sparsesr_b",
    "sparsesr_s",
    "sparsesr_t",
]
