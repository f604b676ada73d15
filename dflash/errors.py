"""The errors that a user or a file can cause.

Each message is one sentence that says what is wrong, where (file, line, field) and what to do. The command line prints
it to stderr without a traceback and leaves with `exit_code`. Broken invariants of our own are `assert`s instead.
"""

import errno
import re
import signal


class DflashError(Exception):
    """Something a user or a file can cause."""

    exit_code = 1


class DiskFullError(DflashError):
    """No space left; a launcher tells it from a broken run by its exit code."""

    exit_code = errno.ENOSPC  # 28


class Interrupted(DflashError):
    """A stop was asked for by a signal; the message says what is kept."""

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def cause(error: BaseException) -> str:
    """What an error of another library says, to stand inside a sentence of ours: the first of its own."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    lines = [line.strip() for line in text.splitlines()]
    told = lines[1] if lines[0].endswith(":") and len(lines) == 2 else lines[0]
    return re.split(r"[.!?] +(?=[A-Z`])", told, maxsplit=1)[0].rstrip(".!:")
