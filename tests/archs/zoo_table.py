"""Writes the table of published networks in ``sr/archs/README.md`` from their records, counting and measuring anew.

``python tests/archs/zoo_table.py [--weights FOLDER]``: files of that folder are used instead of downloads where they
are those of the records. All networks are timed in turn in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sr
from sr.efficiency import HD, Run, cards
from sr.errors import SRError, run_script
from sr.fetch import check_file
from sr.weights import PRETRAINED, PretrainedWeights, Scores

README = Path(sr.__file__).parent / "archs" / "README.md"
BEGIN, END = "<!-- zoo_table.py -->", "<!-- end -->"
SETS = ("Set5", "Set14", "B100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="folder with published files")
    parser.add_argument("--size", type=int, nargs=2, default=HD, help="output that is timed (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    records = [record for record in PRETRAINED.values() if record.url]
    networks = {record.name: sr.load(find(record, args.weights)) for record in records}
    counted = cards(networks, measure_time=False)
    measured = cards(networks, size=tuple(args.size), run=Run(repeats=args.repeats))
    table = "\n".join(lines(records, counted, measured))

    text = README.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    if not found or END not in rest:
        raise SRError(f"{README} lacks the marks {BEGIN} and {END}, between which the table goes")
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def find(record: PretrainedWeights, folder: Path | None) -> Path:
    """The published file: in the folder under its own name, or downloaded."""
    path = folder / record.url.rpartition("/")[2] if folder else None
    if path is None or not path.is_file():
        return record.obtain()
    check_file(path, size=record.size, sha256=record.sha256)
    return path


def lines(records: list[PretrainedWeights], counted: dict[str, Any], measured: dict[str, Any]) -> Iterator[str]:
    """The table, and under it how it was made."""
    yield f"| weights | parameters | MACs | latency | {' | '.join(SETS)} | licence |"
    yield "|---" * (5 + len(SETS)) + "|"
    for record in sorted(records, key=lambda record: (record.scale, counted[record.name]["macs"])):
        count, time = counted[record.name], measured[record.name]["latency"]["median_ms"]
        cells = [f"`{record.name}`", f"{count['parameters'] / 1e3:.0f} K", f"{count['macs'] / 1e9:.1f} G"]
        cells += [f"{time:.0f} ms", *(pair(record.metrics, record.paper, name) for name in SETS), record.licence]
        yield f"| {' | '.join(cells)} |"
    some = next(iter(measured.values()))
    run, output = some["run"], "x".join(map(str, some["output"]))
    yield ""
    yield (
        f"PSNR_Y / SSIM_Y here, the paper's in brackets. MACs for an output of {HD[0]}x{HD[1]}; latency for {output}: "
        f"median of {run['repeats']} runs in turn,\n{run['device']} ({run['device_name']}), threads: {run['threads']}, "
        f"{run['dtype']}, torch {run['torch']}."
    )


def pair(here: Scores, paper: Scores, name: str) -> str:
    """``37.996 / 0.9605 (38.00 / 0.9605)``; a dash for what was not measured."""
    own = "{:.3f} / {:.4f}".format(*here[name]) if name in here else "-"
    return f"{own} ({'{:.2f} / {:.4f}'.format(*paper[name])})" if name in paper else own


if __name__ == "__main__":
    run_script(main)
