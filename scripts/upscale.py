"""Enlarge pictures: ``python scripts/upscale.py INPUT... [-o OUTPUT] [-m MODEL] [-s SCALE]``."""

import argparse
import contextlib
import functools
import sys
from pathlib import Path

EXAMPLES = """\
examples:
  upscale.py photo.jpg                        photo_x2.png beside it
  upscale.py photo.jpg -o large.jpg -s 1.5    another name, format and size
  upscale.py photos -o large -r               a folder with its sub-folders
  upscale.py photos -o large -r --skip-existing --manifest done.jsonl
                                              go on after an interruption
  upscale.py -i photos -o large -n sparsesr_t_x2 -t 256 --fp32
  upscale.py - < photo.jpg > large.png        in a pipe

exit status: 0 all done, 1 some pictures failed (one line each), 2 a mistake in the command, 130 stopped
"""


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def pair(text: str, between: str, example: str) -> tuple[int, int]:
    try:
        first, second = map(int, text.split(between))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {example}") from None
    return first, second


def size(text: str) -> tuple[int, int]:
    return pair(text, "x", "WIDTHxHEIGHT, e.g. 3840x2160")


def part(text: str) -> tuple[int, int]:
    return pair(text, "/", "I/N, e.g. 2/8")


def tile(text: str) -> int | str | None:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of pixels (0: no tiles) nor auto")
    return int(text) or None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="upscale.py INPUT... [-o OUTPUT] [-m MODEL] [-s SCALE] [options]",
        description="Enlarge pictures with a super-resolution network; what belongs to them is kept.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("inputs", nargs="*", default=[], metavar="INPUT", help="picture, folder, glob, or - for standard input")
    add("-i", "--input", nargs="+", default=[], metavar="INPUT", help="the same")
    add(
        "-o",
        "--output",
        help="folder; file, for one picture; - for standard output (default: beside the input, or FOLDER_x2)",
    )

    add = parser.add_argument_group("network and size").add_argument
    add("-m", "-n", "--model", help="weights file or name of known weights (default: installed, by the scale)")
    add("-s", "--scale", "--outscale", type=float, help="output edge / input edge, also 3.5 (default: the network's)")
    add("--size", type=size, metavar="WxH", help="exact size of the output instead, e.g. 3840x2160")
    add("--tta", action="store_true", help="mean over the eight turns and mirrors of the picture: 8 times slower")
    add("--wrap", action="store_true", help="opposite borders meet: for textures that repeat")
    add("--keep-color", action="store_true", help="correct slow changes of colour to the input's")
    add("--sparsity", type=float, help="SparseSR: texture up to which windows skip attention, 0 to 1")

    add = parser.add_argument_group("speed and memory").add_argument
    add(
        "-t",
        "--tile",
        type=tile,
        default="auto",
        help="tile's edge in input pixels, 0: none (default: auto, by memory)",
    )
    add("--check-tiles", action="store_true", help="compute in one piece, too, and tell the largest difference")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="precision (auto: fp32; on a GPU fp16 for 8-bit pictures)",
    )
    add("--fp32", dest="dtype", action="store_const", const="fp32", help="the same as --dtype fp32")
    add("--compile", action="store_true", help="torch.compile: a slow start, then faster")

    add = parser.add_argument_group("files").add_argument
    add("-r", "--recursive", action="store_true", help="sub-folders, too; they are mirrored in OUTPUT")
    add("--ext", help="format of the results: png, jpg, webp, tif, ... (default: the input's; PNG for lossy ones)")
    add("--suffix", help="added to the name (default: _x2, _x4 ... beside the input, nothing in a folder OUTPUT)")
    add("--quality", type=int, help="of lossy formats, 1 to 100 (default: JPEG 95, AVIF 90, WebP without loss)")
    add("--skip-existing", action="store_true", help="leave out what has its result (else results are replaced)")
    add("--overwrite", action="store_true", help="an input may be replaced by its result")
    add("--shard", type=part, metavar="I/N", help="part I of N, for N processes that share the work")
    add("--manifest", type=Path, metavar="FILE", help="add a JSON line for each picture to this file")
    add("--json", action="store_true", help="JSON lines instead of text on standard output")
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given else len(given)  # what follows are names, also those that begin with -
    args = parser.parse_intermixed_args(given[:end])
    args.inputs += args.input + given[end + 1 :]
    if not args.inputs:
        parser.error("give a picture or a folder")
    return args


def main(args: argparse.Namespace) -> int:
    import sr  # before torch, whose settings it makes

    # isort: split
    import torch

    from sr.archs.sparsesr import set_sparsity
    from sr.batch import Batch, Naming, Report, known_suffix, plan, shard
    from sr.weights import default_weights

    if args.size and args.scale:
        raise sr.SRError("--size and --scale both say how large the result is; leave one out")
    if args.skip_existing and args.overwrite:
        raise sr.SRError("--skip-existing keeps what --overwrite replaces; leave one out")
    if args.quality is not None and not 1 <= args.quality <= 100:
        raise sr.SRError(f"--quality lies in 1 to 100, not {args.quality}")
    model = args.model or default_weights(args.scale).name
    where = {"device": args.device or "cpu"} if model.endswith(".onnx") else {}  # it stays where it is opened
    network = functools.cache(lambda: sr.load(model, **where))  # not before it is known that there is something to do

    def mark() -> str:
        return f"_{args.size[0]}x{args.size[1]}" if args.size else f"_x{args.scale or network().scale:g}"

    naming = Naming(mark, args.suffix, args.ext and known_suffix(args.ext))
    options = {"recursive": args.recursive, "skip_existing": args.skip_existing, "overwrite": args.overwrite}
    jobs = plan(args.inputs, args.output, naming, **options)
    jobs = shard(jobs, *args.shard) if args.shard else jobs
    if args.sparsity is not None:
        set_sparsity(network(), args.sparsity)
    upscaler = sr.Upscaler(
        network(),
        tile=args.tile,
        device=args.device,
        dtype=getattr(torch, DTYPES[args.dtype]) if args.dtype in DTYPES else "auto",
        outscale=args.scale,
        size=args.size,
        tta=args.tta,
        wrap=args.wrap,
        keep_color=args.keep_color,
        compile=args.compile,
    )
    to_stdout = any(job.target is None for job in jobs)
    if to_stdout and args.json:
        raise sr.SRError("--json and the picture would both go to standard output; give a file with -o")
    if to_stdout and sys.stdout.isatty():
        raise sr.SRError("the picture would be shown as text; send it to a file with > or -o")
    if args.manifest and any(job.target and job.target.resolve() == args.manifest.resolve() for job in jobs):
        raise sr.SRError(f"{args.manifest} would be the manifest and a result; give one of them another name")
    with Report(len(jobs), as_json=args.json, manifest=args.manifest, picture_on_stdout=to_stdout) as report:
        batch = Batch(
            upscaler,
            model,
            quality=args.quality,
            stream_suffix=naming.ext or ".png",
            skip_existing=args.skip_existing,
            check_tiles=args.check_tiles,
            progress=report.tiles,
        )
        with contextlib.closing(batch.run(jobs)) as records:
            for record in records:
                report.add(record)
        return report.close()


if __name__ == "__main__":
    args = parse()  # first: what follows loads PyTorch, which --help does without
    from sr.errors import run_script

    run_script(lambda: main(args))
