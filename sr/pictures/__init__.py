"""Pictures as people have them: every mode and depth, animations, metadata, and stills larger than the memory.

``sr.image`` is the small sister of this package, which data sets are read with.
"""

from sr.pictures.header import Info, probe
from sr.pictures.metadata import Metadata, left_out
from sr.pictures.reader import Picture, RowReader, read_picture
from sr.pictures.writer import (
    INPUT_SUFFIXES,
    OUTPUT_SUFFIXES,
    RowWriter,
    format_of,
    needs_rows,
    output_format,
    write_picture,
)

__all__ = [
    "INPUT_SUFFIXES",
    "OUTPUT_SUFFIXES",
    "Info",
    "Metadata",
    "Picture",
    "RowReader",
    "RowWriter",
    "format_of",
    "left_out",
    "needs_rows",
    "output_format",
    "probe",
    "read_picture",
    "write_picture",
]
