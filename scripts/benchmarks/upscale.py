"""A folder of small pictures, file to file, against the bare network on tensors that are decoded already."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sr
from sr.batch import Batch, Job
from sr.errors import SRError
from sr.image import list_images, open_image, save_image, to_tensor
from sr.weights import default_weights


def write_crops(source: Path, folder: Path, count: int, size: int, ext: str) -> list[Job]:
    """``count`` crops of the photographs in ``source``, spread over each, and the jobs that upscale them."""
    pictures = [open_image(path).convert("RGB") for path in list_images(source)]
    for out in ("in", "out"):
        (folder / out).mkdir()
    jobs = []
    for i in range(count):
        picture = pictures[i % len(pictures)]
        left, top = (int((i * 0.6180339887 % 1) * max(edge - size, 0)) for edge in picture.size)
        name = f"{i:03d}{ext}"
        save_image(picture.crop((left, top, left + size, top + size)), folder / "in" / name)
        jobs.append(Job(folder / "in" / name, folder / "out" / f"{i:03d}.png"))
    return jobs


def upscale(args: argparse.Namespace) -> None:
    """What reading, planning and writing cost beside the network."""
    model = args.model or default_weights().name
    upscaler = sr.Upscaler(sr.load(model), device=args.device)
    seconds: dict[str, list[float]] = {"bare network": [], "files": []}
    with tempfile.TemporaryDirectory() as folder:
        jobs = write_crops(args.data, Path(folder), args.count, args.size, args.ext)
        tensors = [to_tensor(open_image(job.source))[None].to(upscaler.device) for job in jobs if job.source]
        tensors = [x.contiguous(memory_format=torch.channels_last) for x in tensors]
        narrow = torch.autocast(upscaler.device.type, dtype=upscaler.dtype, enabled=upscaler.dtype != torch.float32)
        for turn in range(args.repeats + 1):  # the first one warms up
            start = time.perf_counter()
            with torch.inference_mode(), narrow:
                for x in tensors:
                    last = upscaler.network(x)
            last.cpu()  # waits for a GPU
            middle = time.perf_counter()
            with contextlib.closing(Batch(upscaler, model).run(jobs)) as records:
                failed = [record.error for record in records if record.status != "done"]
            if failed:
                raise SRError(f"{len(failed)} pictures failed; the first: {failed[0]}")
            if turn:
                seconds["bare network"].append(middle - start)
                seconds["files"].append(time.perf_counter() - middle)
    print(f"{args.count} pictures {args.size}x{args.size} ({args.ext}), {model}, {args.device}; medians of turns\n")
    print("| | ms/picture | speed against the bare network (range) |\n|---|---|---|")
    for name, values in seconds.items():
        ratios = sorted(bare / own for bare, own in zip(seconds["bare network"], values, strict=True))
        each = 1000 * statistics.median(values) / args.count
        print(f"| {name} | {each:.2f} | {statistics.median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f}) |")


def add_to(commands: Any) -> None:
    """Add the subcommand ``upscale``."""
    command = commands.add_parser("upscale", help=upscale.__doc__, description=__doc__)
    command.add_argument("-m", "--model", help="weights (default: those that upscale.py takes)")
    command.add_argument("--data", type=Path, default=Path("datasets/sample/train"), help="folder of photographs")
    command.add_argument("--count", type=int, default=200)
    command.add_argument("--size", type=int, default=128, help="edge of a picture (default: 128)")
    command.add_argument("--ext", default=".png", choices=[".png", ".jpg"], help="format of the inputs")
    command.add_argument("--device", default="cpu")
    command.set_defaults(run=upscale)
