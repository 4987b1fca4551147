"""A CSV log that goes on when a run is resumed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from sr.atomic import write_text
from sr.errors import SRError


class ResumableCSVLogger(CSVLogger):
    """Writes ``metrics.csv`` into the run folder; Lightning's own would delete what a resumed run logged before.

    Args:
        folder: the run folder.
        first_step: the step the run goes on from; rows of later steps, lost with the interruption, are dropped.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        super().__init__(str(folder), name="", version="", flush_logs_every_n_steps=100)
        self._first_step = first_step
        self._writer: _Writer | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer, made on first use, so that a run which never starts leaves no file."""
        if self._writer is None:
            self._writer = self._experiment = _Writer(self.log_dir, self._first_step)
        return self._writer


class _Writer(ExperimentWriter):
    def __init__(self, log_dir: str, first_step: int) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            whole = [row for row in reader if None not in row.values() and row["step"].isdecimal()]  # a full disk cuts
            self.metrics_keys = list(reader.fieldnames or [])
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=self.metrics_keys)
        writer.writeheader()
        writer.writerows(row for row in whole if int(row["step"]) <= first_step)
        write_text(path, text.getvalue())

    def save(self) -> None:
        try:
            super().save()
        except OSError as e:
            raise SRError(f"cannot write the log {self.metrics_file_path} ({e.strerror or e})") from e

    def _check_log_dir_exists(self) -> None:
        """The run folder is there already; nothing in it is deleted."""
