"""Two settings without which PyTorch is slow on a CPU; applied on import, unless the user set them otherwise."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def _tune() -> None:
    # How long a waiting OpenMP thread spins before it sleeps; read when torch is loaded. By default it spins so long
    # that anything else on the same cores slows training many times over (a plain network of 150 K parameters, a second
    # training beside it: 810 ms a step with 100,000, 210 ms with this value); on a quiet machine nothing is lost.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Maps of more than 32 MB are by default taken from the system and returned at every single operation, which costs
    # more than the operation: sparsesr_t x4 on a 512 x 512 picture took 1,006 ms, and takes 418 ms if memory is kept.
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_tune()
