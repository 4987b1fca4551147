"""Enlarging files: which becomes which, decoding and encoding beside the network, and what is said about it."""

from sr.batch.inputs import Job, Naming, known_suffix, plan, shard
from sr.batch.reports import Report
from sr.batch.run import Batch, Record

__all__ = ["Batch", "Job", "Naming", "Record", "Report", "known_suffix", "plan", "shard"]
