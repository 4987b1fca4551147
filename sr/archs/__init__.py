"""One file per network family; importing this package registers them all."""

from sr.archs.assanet import ASSANet, assanet_b, assanet_l, assanet_s
from sr.archs.bsrn import BSRN, bsrn
from sr.archs.external import SpandrelNetwork
from sr.archs.imdn import IMDN, imdn
from sr.archs.pan import PAN, pan
from sr.archs.rlfn import RLFN, rlfn, rlfn_s
from sr.archs.smfanet import SMFANet, smfanet, smfanet_plus
from sr.archs.sparsesr import SparseSR, sparsesr_b, sparsesr_s, sparsesr_t

__all__ = [
    "BSRN",
    "IMDN",
    "PAN",
    "RLFN",
    "ASSANet",
    "SMFANet",
    "SpandrelNetwork",
    "SparseSR",
    "assanet_b",
    "assanet_l",
    "assanet_s",
    "bsrn",
    "imdn",
    "pan",
    "rlfn",
    "rlfn_s",
    "smfanet",
    "smfanet_plus",
    "sparsesr_b",
    "sparsesr_s",
    "sparsesr_t",
]
