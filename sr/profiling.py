"""Measuring time and memory so that the figures hold on a noisy machine."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Job = Callable[[], object]


def timings(jobs: Mapping[str, Job], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run of each job; they take turns, A B C A B C, so that other load meets them alike.

    Args:
        jobs: what to time; each runs once before, unmeasured.
        repeats: how often each is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return times


def alternate(jobs: Mapping[str, Job], repeats: int) -> dict[str, float]:
    """Median seconds of each job, of :func:`timings`."""
    return {name: statistics.median(seconds) for name, seconds in timings(jobs, repeats).items()}


def extra_memory(make_job: Callable[..., Job], *args: Any) -> float:
    """MiB by which one run of a job raises the peak of resident memory (Linux).

    It is measured in a fresh process, after a first run, so that the libraries' own buffers do not count. That process
    takes every block of 64 KiB or more from the system and returns it at once: resident memory is memory in use.

    Args:
        make_job: a function of a module that can be imported; called there to make the job.
        *args: its arguments.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc's, read at start-up
    before = {name: os.environ.get(name) for name in allocator}
    os.environ.update(allocator)
    try:
        process = context.Process(target=_measure, args=(sender, torch.get_num_threads(), make_job, args))
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        raise RuntimeError("the measuring process died; its error is above") from None
    finally:
        process.join()


def _measure(sender: Any, threads: int, make_job: Callable[..., Job], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    job = make_job(*args)
    for _ in range(2):
        job()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    job()
    sender.send(_status("VmHWM") - before)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
