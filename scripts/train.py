"""Train a network: ``python scripts/train.py --config configs/quickstart.yaml [--trainer.max_steps 1000 ...]``."""

from sr.cli import main
from sr.errors import run_script

if __name__ == "__main__":
    run_script(main)
