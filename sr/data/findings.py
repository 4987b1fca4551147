"""What a check of data sets found, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

Level = Literal["error", "warning", "note"]

#: The levels, worst first, and how they look in a terminal.
STYLES: dict[Level, str] = {"error": "bold red", "warning": "yellow", "note": "dim"}
_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """One kind of fault in one data set.

    Attributes:
        level: ``error``: training would stop or mislead; ``warning``: probably not meant; ``note``: good to know.
        data_set: its name; of several, separated by a comma.
        message: what was found.
        files: all that it concerns.
    """

    level: Level
    data_set: str
    message: str
    files: tuple[Path, ...] = ()


@dataclass
class Report:
    """What :func:`check` found.

    Attributes:
        findings: errors first.
        summary: a line for each data set about what was looked at.
    """

    findings: list[Finding] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not any(f.level == "error" for f in self.findings)

    def table(self) -> Table:
        """The findings for the terminal, with the first few file names of each."""
        caption = "\n".join([*self.summary, "" if self.findings else "nothing found"]).strip()
        table = Table("", "data set", "finding", "files", caption=Text(caption), caption_justify="left")
        for f in self.findings:
            names = [path.name for path in f.files[:_SHOWN]]
            more = [f"and {len(f.files) - _SHOWN} more"] if len(f.files) > _SHOWN else []
            cells = (f.data_set, f.message, "\n".join(names + more))  # Text: brackets in names are no markup
            table.add_row(Text(f.level, STYLES[f.level]), *map(Text, cells))
        return table

    def to_json(self) -> str:
        """Everything, with whole paths."""
        findings = [{**vars(f), "files": [str(path) for path in f.files]} for f in self.findings]
        return json.dumps({"ok": self.ok, "summary": self.summary, "findings": findings}, indent=2, ensure_ascii=False)
