"""One line for each mistake a user can make, printed once, with a non-zero exit on every rank."""

import contextlib
import difflib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# How long the other ranks wait for the main process to print the same mistake and end the run. The launcher stops
# them as soon as it has; only a mistake that the main process does not share (a file missing on one node) outlasts it.
OTHER_RANKS_WAIT_SECONDS = 15


def fail(message: str) -> None:
    """Print `message` as one line on stderr, once for the whole run, and exit with status 1."""
    rank = int(os.environ.get("RANK", "0"))
    where = ""
    if rank != 0:
        time.sleep(OTHER_RANKS_WAIT_SECONDS)
        where = f" (rank {rank} only)"
    print(f"error{where}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    # Not `sys.exit`: a rank that is inside a failed collective, or holds a process group others still use, can hang in
    # the interpreter's clean-up, and the launcher would wait for it.
    sys.stdout.flush()
    os._exit(1)


def raise_first(problems: Iterable[str]) -> None:
    """Raise ValueError for the first of the problems, if there is one."""
    for problem in problems:
        raise ValueError(problem)


def refusals(check: Callable, *args) -> Iterator[str]:
    """What the ValueError says that `check(*args)` raises, if it does."""
    try:
        check(*args)
    except ValueError as error:
        yield str(error)


def out_of_range(ranges: Iterable[tuple[str, str, Callable]], *groups) -> Iterator[str]:
    """A line for each argument that is out of range.

    Args:
        ranges: (argument, what it must be in words, the test).
        groups: objects with the arguments; the first that has one is asked.
    """
    for name, what, good in ranges:
        value = next(getattr(group, name) for group in groups if hasattr(group, name))
        if not good(value):
            yield f"--{name} {value} must be {what}"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` for an unknown name, or nothing if no known one is like it."""
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


@contextlib.contextmanager
def one_line_errors():
    """Turn an error about what the user asked for into one line; `TRACEBACK=1` shows the whole traceback instead.

    Covers the stages before training, where a ValueError, OSError or ImportError speaks of an argument, a file or a
    package. One raised by a library also names the place, since its text was not written for this script.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("TRACEBACK") == "1":
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        here = Path(__file__).resolve().parent
        ours = Path(frame.filename).resolve().parent == here
        place = "" if ours else f" [{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}]"
        fail(f"{error}{place}")
