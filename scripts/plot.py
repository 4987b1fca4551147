"""Draw the curves of several runs into one picture: ``python scripts/plot.py runs/a/001 runs/b/001 -o curves.png``."""

import argparse
from pathlib import Path

from sr.errors import run_script
from sr.plots import plot_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    plot_runs(args.runs, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_script(main)
