"""Weights and configs from and to other tools: ``python scripts/convert.py inspect weights.pth`` and more."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import sr
from sr import checkpoint
from sr.errors import SRError, run_script
from sr.onnx_network import OnnxNetwork
from sr.weights import PRETRAINED, PretrainedWeights, find_weights

SUFFIXES = {"onnx": ".onnx", "pth": ".pth", "safetensors": ".safetensors", "pt2": ".pt2", "card": ".md"}


def inspect(args: argparse.Namespace) -> int:
    """Say what a weights file is, and whether it loads (status 1 if not)."""
    report = checkpoint.inspect(args.file)
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return 1 if report.problem else 0


def export(args: argparse.Namespace) -> None:
    """Write weights for other tools; graphs and .pth are read back and compared with the network first."""
    from sr import export as to  # here: the other commands need neither this nor what it imports

    if args.to != "onnx" and (args.fp16 or args.opset is not None):
        raise SRError("--fp16 and --opset are for --to onnx")
    output = args.output or default_output(args.file, args.to, args.fp16)
    to.check_path(output, SUFFIXES[args.to], inputs=[args.file])
    network = sr.load(args.file)
    if isinstance(network, OnnxNetwork):
        raise SRError(f"{args.file} is an ONNX file; there is no network in it that could be written as something else")
    record, metadata = describe(args.file)
    info = metadata.get("info", {})
    licence = info.get("licence") or (record.licence if record else None)
    difference = None
    if args.to == "onnx":
        more = {} if args.opset is None else {"opset": args.opset}
        said = {"licence": str(licence)} if licence else {}
        difference = to.export_onnx(network, output, half=args.fp16, metadata=said, **more)
    elif args.to == "pt2":
        difference = to.export_program(network, output)
    elif args.to == "pth":
        to.export_pth(network, output, trained(args.file))
    elif args.to == "safetensors":
        own = {"averaged": checkpoint.inspect(args.file).averaged} | ({"licence": licence} if licence else {})
        sr.save(network, output, info=own | info)
    else:
        from sr.atomic import write_text
        from sr.card import model_card
        from sr.efficiency import Run, card

        cost = info.get("efficiency") or card(network, run=Run(repeats=3))
        write_text(output, model_card(record.name if record else Path(args.file).name, network, cost, metadata, record))
    compared = "" if difference is None else f" (differs by at most {difference:.1e} from the network)"
    print(f"{args.file} -> {output}{compared}")


def default_output(source: str, kind: str, half: bool) -> Path:
    """Beside a file, or in this folder for weights that are known by name."""
    path = Path(source)
    base = path.with_suffix("") if path.is_file() else Path(source)
    return base.with_name(f"{base.name}{'_fp16' if half else ''}{SUFFIXES[kind]}")


def trained(source: str) -> sr.SRNetwork | None:
    """The network as it was trained, if what :func:`sr.load` gives is the average and the file holds both."""
    if not checkpoint.inspect(source).averaged:
        return None
    try:
        return sr.load(source, which="raw")
    except SRError:  # there is the average alone
        return None


def describe(source: str) -> tuple[PretrainedWeights | None, dict[str, Any]]:
    """The record of known weights, and what a file says of itself, as far as there are such."""
    path = Path(source)
    if path.is_file():  # a published file may have any name
        same = [record for record in PRETRAINED.values() if record.size == path.stat().st_size]
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if same else ""
        record = next((record for record in same if record.sha256 == digest), None)
    else:
        record = find_weights(source)
    try:
        return record, checkpoint.read_info(source)
    except SRError:  # a file without metadata; what is wrong with others, loading has said
        return record, {}


def config(args: argparse.Namespace) -> None:
    """Turn a training config of BasicSR, neosr or traiNNer into one for scripts/train.py, on standard output."""
    from sr.basicsr import convert, read

    own, notes = convert(read(args.file))
    print(f"# Converted from {args.file.name} by scripts/convert.py.")
    for note in notes:  # in the file as well: who trains with it later has not seen what was said here
        print(f"# {note}")
        print(note, file=sys.stderr)
    print(yaml.safe_dump(own, sort_keys=False), end="")


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    command = add(inspect)
    command.add_argument("file", help="weights file, or the name of known weights")
    command.add_argument("--json", action="store_true", help="for programs")
    command = add(export)
    command.add_argument("file", help="weights file, or the name of known weights")
    command.add_argument("--to", required=True, choices=SUFFIXES, help="what to write")
    command.add_argument("-o", "--output", type=Path, help="default: the same name with another suffix")
    command.add_argument("--fp16", action="store_true", help="onnx: weights and computation in float16")
    command.add_argument("--opset", type=int, help="onnx: version of the operators (default: 18)")
    command = add(config)
    command.add_argument("file", type=Path, help="the YAML (or TOML) file")
    args = parser.parse_args()
    status: int | None = args.run(args)
    return status


if __name__ == "__main__":
    run_script(main)
