"""The one exception type whose message is written for the person at the keyboard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


class SRError(ValueError):
    """A mistake that the user can mend.

    The message says, in one or two lines, what is wrong, where, and what to do. The scripts print it
    without a traceback and exit with status 2.
    """


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's ``main`` and exit.

    The status is what ``main`` returns (``None``: 0), 2 after the message of an :class:`SRError`, 130 after Ctrl-C.
    """
    try:
        sys.exit(main() or 0)
    except SRError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
