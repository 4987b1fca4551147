"""How much memory there is, and how much a network takes for a pixel."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PROBE = 96  # edge, in pixels, of the picture that tells the memory for a pixel
# What functions allocate inside, workspaces of convolutions, and what the allocator cannot use.
_UNSEEN = 1.5


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on a CPU without swapping, and within a container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch holds in reserve is as good as free.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    values = [_system_memory()]
    for folder, limit, used, cached in (  # control groups, version 2 and 1
        ("/sys/fs/cgroup", "memory.max", "memory.current", "{}_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file"),
    ):
        most, now = _number(f"{folder}/{limit}"), _number(f"{folder}/{used}")
        if most is not None and now is not None:
            # What files were read counts as used, but gives way to whoever needs memory.
            cache = sum(_entry(f"{folder}/memory.stat", cached.format(kind)) for kind in ("active", "inactive"))
            values.append(max(0, most - max(0, now - cache)))
    return min(values)


def give_back_memory() -> None:
    """Return to the system what was freed; does nothing where the C library offers no way.

    :mod:`sr.process` has freed memory kept, which is faster; rows of tiles leave gaps in it.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _number(path: str) -> int | None:
    """The whole number that a file holds; ``None`` if it is missing or says ``max``."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _entry(path: str, name: str) -> int:
    """The number behind a name in a file with one of each a line; 0 if there is none."""
    try:
        return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.split()[0] == name)
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def _system_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30  # Windows and others: a guess that every machine can afford


class _Tracker(TorchFunctionMode):
    """Counts the bytes of the tensors that are alive, and the most that there were.

    Those that a function of PyTorch makes and drops inside are not seen. A dispatch mode would see them, but its first
    use takes longer than a picture: it imports the compiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor) and not value.is_meta:
                with torch._C.DisableTorchFunction():
                    self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: weakref.ref) -> None:
            self._known.pop(key, None)
            self.alive -= size

        self._known[key] = weakref.ref(storage, gone)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def bytes_per_pixel(run: Callable[[Tensor], object]) -> float:
    """Memory for a pixel of the input of ``run``, measured on a small picture (1, 3, 96, 96) of noise.

    Counted are the tensors that are alive at the same time; the same on every device.
    """
    lq = torch.rand(1, 3, _PROBE, _PROBE, generator=torch.Generator().manual_seed(0))
    tracker = _Tracker()
    with torch.inference_mode(), tracker:
        run(lq)
    return _UNSEEN * tracker.peak / _PROBE**2
