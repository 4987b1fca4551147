"""Get data ready for training: ``python scripts/prepare_data.py check --config configs/quickstart.yaml`` and more."""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from sr.data import PatchDataset, streaming
from sr.data import download as sets
from sr.data.check import check as find_faults
from sr.errors import SRError, run_script


def read_config(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The data module of a training config, with what the command line overrides."""
    from sr.cli import DataCLI, set_up_logging

    set_up_logging()
    data = DataCLI(["--config", str(args.config), *args.overrides]).datamodule
    if data.stream is not None:
        raise SRError("data.train is a stream, whose pictures were checked when it was written; this is for folders")
    return data


def pack(args: argparse.Namespace) -> None:
    """Decode all pictures of a config ahead of training, into the packs that training will map."""
    data = read_config(args)
    if not data.cache:
        raise SRError("data.cache is false in this config, so training would not use a pack")
    data.setup("fit")
    print("the packs are ready; training maps them as they are")


def check(args: argparse.Namespace) -> int:
    """Look for faults in the pictures of a config: all of them, not just the first."""
    data = read_config(args)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking")
        report = find_faults(
            data.train_sets,
            data.val_sets,
            data.scale,
            data.gt_size,
            thorough=not args.fast,
            on_error=data.on_error,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    Console().print(report.table())
    if args.json is not None:
        try:
            args.json.write_text(report.to_json())
        except OSError as e:
            raise SRError(f"cannot write {args.json} ({e.strerror})") from e
    return 0 if report.ok else 1


def preview(args: argparse.Namespace) -> None:
    """Write a contact sheet: GT patches, and several LQ versions that training may see of each."""
    data = read_config(args)
    patches = PatchDataset(data.train_sets, data.scale, data.gt_size, data.seed, on_error=data.on_error)
    samples = [patches[i] for i in range(args.rows)]
    gt = torch.stack([s["gt"] for s in samples])
    if data.degradation is None:
        columns = {"GT": gt, "LQ": torch.stack([s["lq"] for s in samples])}
    else:
        columns = {"GT": gt} | {f"LQ {i + 1}": data.degrade(gt / 255, i)[0] for i in range(args.draws)}
    from sr.image import save_image
    from sr.preview import contact_sheet

    rows = [[column[i] for column in columns.values()] for i in range(args.rows)]
    save_image(contact_sheet(rows, list(columns)), args.output)
    print(f"wrote {args.output}")


def distill(args: argparse.Namespace) -> None:
    """Write what a trained network makes of a config's pictures, for a smaller one to learn from as if it were GT."""
    from sr.distill import distill as write

    data = read_config(args)
    if data.degradation is not None:
        raise SRError("the teacher's pictures are made of clean LQ; leave data.degradation out")
    for pictures in data.train_sets:
        pictures.prepare(data.scale, data.on_error)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("distilling", total=sum(map(len, data.train_sets)))
        write(data.train_sets, data.scale, args.teacher, args.to, lambda: bar.advance(task))
    folders = f"gt: {args.to}/GT, lq: {args.to}/LQ"
    print(f"train on them with data.train: {{class_path: sr.data.PairedFolder, init_args: {{{folders}}}}}")


def download(args: argparse.Namespace) -> None:
    """Download public data sets, or unpack archives that are there already, and check them."""
    for folder in sets.download(args.name, args.to, args.archives):
        print(folder)


def optimize(args: argparse.Namespace) -> None:
    """Write pictures into chunks that training streams from a folder or an object store."""
    streaming.optimize(args.inputs, args.to, args.workers, args.on_error)
    print(f"train on them with data.train: {{class_path: sr.data.StreamingGTDataset, init_args: {{root: {args.to}}}}}")


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run, config: bool = False):  # type: ignore[no-untyped-def]
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        if config:
            command.add_argument("--config", type=Path, required=True, help="a training config")
        return command

    add(pack, config=True)
    command = add(check, config=True)
    command.add_argument("--fast", action="store_true", help="what headers tell, without decoding")
    command.add_argument("--json", type=Path, help="write the findings there as well")
    command = add(preview, config=True)
    command.add_argument("-o", "--output", type=Path, default=Path("preview.png"))
    command.add_argument("--rows", type=positive, default=4, help="number of patches")
    command.add_argument("--draws", type=positive, default=4, help="number of LQ versions of each")
    command = add(distill, config=True)
    command.add_argument("--teacher", required=True, help="a weights file, or the name of known weights")
    command.add_argument("--to", type=Path, required=True, help="folder that gets GT/ and LQ/")
    command = add(download)
    command.add_argument("name", choices=sorted(sets.SETS))
    command.add_argument("--to", type=Path, default=Path("datasets"), help="folder that gets a folder for each set")
    command.add_argument("--from", dest="archives", type=Path, nargs="+", default=[], help="archives you have already")
    command = add(optimize)
    command.add_argument("inputs", type=Path, nargs="+", help="folders of pictures")
    command.add_argument("--to", required=True, help="an empty folder, or a URL such as s3://bucket/folder")
    command.add_argument("--workers", type=int, help="processes (default: one a core)")
    command.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="for unreadable pictures")
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    if overrides and not hasattr(args, "config"):
        parser.error(f"unknown: {' '.join(overrides)}")
    return args.run(args)


if __name__ == "__main__":
    run_script(main)
