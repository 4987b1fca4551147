"""Work on a batch a piece at a time on a CPU, the pieces in parallel; on a GPU all at once.

PyTorch's own threads share each operation and wait for one another after it. Here each takes some pictures through a
whole step and waits once: README.md has the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Barrier

import torch
from torch import Tensor

_PIECE = 1 << 18  # values at a time, one picture of 3 x 256 x 256: what a step makes on the way then stays in the cache


def by_pieces(function: Callable[..., Tensor], x: Tensor, *per_picture: Tensor, size: Sequence[int] = ()) -> Tensor:
    """``function(x, *per_picture)``, where ``function`` treats each picture by itself.

    Args:
        function: takes some pictures and their entries of ``per_picture``; called from other threads.
        x: (N, C, H, W).
        per_picture: tensors with N entries.
        size: (height, width) of the result if it is not that of ``x``.

    Returns:
        (N, C, height, width).
    """
    count = _pictures_at_a_time(x)
    if count >= len(x):
        return function(x, *per_picture)
    result = x.new_empty(*x.shape[:2], *(size or x.shape[2:]))

    def piece(part: slice) -> None:
        result[part] = function(x[part], *(t[part] for t in per_picture))

    _run([partial(piece, slice(start, start + count)) for start in range(0, len(x), count)])
    return result


def by_kind(functions: Sequence[Callable[..., Tensor]], kind: Tensor, x: Tensor, *per_picture: Tensor) -> Tensor:
    """Each picture through the function that its ``kind`` (N,), on the CPU, says; otherwise as :func:`by_pieces`."""
    result, count = torch.empty_like(x), _pictures_at_a_time(x)

    def piece(function: Callable[..., Tensor], index: Tensor) -> None:
        result.index_copy_(0, index, function(*(t[index] for t in (x, *per_picture))))

    groups = [(function, (kind == i).nonzero().squeeze(1).to(x.device)) for i, function in enumerate(functions)]
    _run([partial(piece, function, part) for function, group in groups for part in group.split(count) if len(part)])
    return result


def _pictures_at_a_time(x: Tensor) -> int:
    return max(1, _PIECE // max(1, x[:1].numel()) if x.device.type == "cpu" else len(x))


def _run(pieces: Sequence[Callable[[], None]]) -> None:
    threads = torch.get_num_threads()
    if len(pieces) == 1 or threads == 1:
        for piece in pieces:
            piece()
    else:
        inference = torch.is_inference_mode_enabled()
        for done in [_pool(threads, os.getpid()).submit(_without_gradients, piece, inference) for piece in pieces]:
            done.result()


def _without_gradients(piece: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():  # which a thread does not inherit
        piece()


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that run their operations alone; a forked process, which inherits none, makes its own."""
    pool, together = ThreadPoolExecutor(threads), Barrier(threads + 1)

    def alone() -> None:
        torch.get_num_threads()  # a thread takes over the common number the first time it needs it, which was now
        torch.set_num_threads(1)  # of this thread, and of threads that start from now on
        together.wait()

    for _ in range(threads):
        pool.submit(alone)
    together.wait()
    torch.set_num_threads(threads)  # for threads that start later
    return pool
