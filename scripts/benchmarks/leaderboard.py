"""Networks trained, scored and timed on the same terms: a table, and a plot of PSNR against latency."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sr.errors import SRError
from sr.leaderboard import read_settings, run_leaderboard

_TRAIN = Path(__file__).parents[1] / "train.py"
_STOPPED = (130, 143)  # what train.py exits with once it has saved its state after SIGINT or SIGTERM


def train(arguments: Sequence[str]) -> None:
    """Run ``scripts/train.py``; a Ctrl-C reaches it, too, and it gets the time to save its state."""
    with subprocess.Popen([sys.executable, str(_TRAIN), *arguments]) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
    if status in _STOPPED:
        raise KeyboardInterrupt
    if status:
        raise SRError(f"the training stopped with status {status}; why stands above")


def leaderboard(args: argparse.Namespace) -> None:
    """Train, score and time the networks of a config; the same command again continues where it stopped."""
    settings = read_settings(args.config)
    output = args.output or Path("runs") / args.config.stem
    board = run_leaderboard(settings, output, train)
    print(board.markdown())
    print(f"wrote leaderboard.md, leaderboard.json and leaderboard.png to {output}")
    if board.failed:
        raise SRError(f"left out are {len(board.failed)} runs whose training failed: {'; '.join(board.failed)}")


def add_to(commands: Any) -> None:
    """Add the subcommand ``leaderboard``."""
    command = commands.add_parser("leaderboard", help=leaderboard.__doc__, description=__doc__)
    command.add_argument("--config", type=Path, required=True, help="e.g. configs/leaderboard_cpu.yaml")
    command.add_argument("--output", type=Path, help="folder for runs and results (default: runs/CONFIG)")
    command.set_defaults(run=leaderboard)
