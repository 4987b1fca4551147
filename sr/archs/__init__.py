"""One file per network family; importing this package registers them all."""

from sr.archs.external import SpandrelNetwork
from sr.archs.sparsesr import SparseSR, sparsesr_b, sparsesr_s, sparsesr_t

__all__ = ["SpandrelNetwork", "SparseSR", "sparsesr_b", "sparsesr_s", "sparsesr_t"]
