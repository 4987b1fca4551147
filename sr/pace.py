"""How fast a run goes, and how much of its time it waits for data."""

from __future__ import annotations

import time

from lightning.pytorch.profilers import PassThroughProfiler


class Pace(PassThroughProfiler):
    """Steps and samples a second, and the share of time spent waiting for the next batch.

    Lightning tells its profiler when it asks for a batch and when it has got it, so this takes the place of the one
    that does nothing. Time is counted from the end of the first batch, which warms up, and without validation.

    Attributes:
        batches: how many were counted.
        seconds: time they took, waiting included.
        waited: seconds spent waiting for them; ``None`` if the trainer has another profiler, which is told instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.seconds = 0.0
        self.waited: float | None = None
        self._counted_to: float | None = None
        self._asked = 0.0
        self._lap = (0.0, 0.0)

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._asked = time.monotonic()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            counts = self._counted_to is not None
            self.waited = (self.waited or 0.0) + (time.monotonic() - self._asked if counts else 0.0)

    def batch_done(self) -> None:
        """A batch has been trained on."""
        now = time.monotonic()
        if self._counted_to is not None:
            self.batches += 1
            self.seconds += now - self._counted_to
        self._counted_to = now

    def skip(self) -> None:
        """What happened since the last batch does not count."""
        if self._counted_to is not None:
            self._counted_to = time.monotonic()

    def lap(self) -> float | None:
        """Percentage of the time since the last call that was spent waiting; ``None`` if nobody knows."""
        if self.waited is None or self.seconds == self._lap[0]:
            return None
        seconds, waited = self.seconds - self._lap[0], self.waited - self._lap[1]
        self._lap = (self.seconds, self.waited)
        return 100 * waited / seconds

    def rates(self, batch_size: int, accumulate: int) -> str:
        """The averages over the run, for people; empty before the second batch is done.

        Args:
            batch_size: samples of a batch, over all devices.
            accumulate: batches of an optimiser step.
        """
        if not self.batches:
            return ""
        rate = self.batches / self.seconds
        text = f"{rate / accumulate:.3g} steps/s  {rate * batch_size:.3g} samples/s"
        return text if self.waited is None else f"{text}  data wait {100 * self.waited / self.seconds:.1f} %"
