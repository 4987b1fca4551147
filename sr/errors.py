"""The one exception type whose message is written for the person at the keyboard."""


class SRError(ValueError):
    """A mistake that the user can mend.

    The message says, in one or two lines, what is wrong, where, and what to do. The scripts print it
    without a traceback and exit with status 2.
    """
