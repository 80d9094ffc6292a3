"""The main process first, then one of each node, then the rest, however long it takes.

A barrier gives up after the process group's timeout, and tokenising a large data set takes longer. Here the others look now
and then whether it is their turn, in the store that the ranks met at, which has no deadline.
"""

import contextlib
import os
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from errors import fail

SECONDS_BETWEEN_LOOKS = 0.2
_count = 0


@contextlib.contextmanager
def main_first():
    """Run the block on the main process, then on the first of each node, then on the others.

    What the main process leaves on a disk, the others find: those of its node, and other nodes if they share it.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    global _count
    _count += 1  # each use has its own keys; all ranks come here equally often
    store, rank = _get_default_store(), dist.get_rank()
    first_here = rank - int(os.environ.get("LOCAL_RANK", rank))
    if rank != 0:
        _wait(store, f"turn {_count} of 0")
    if rank not in (0, first_here):
        _wait(store, f"turn {_count} of {first_here}")
    yield
    if rank in (0, first_here):
        store.set(f"turn {_count} of {rank}", "done")


def _wait(store, key: str) -> None:
    try:
        while not store.check([key]):
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except RuntimeError as error:  # torch's DistError: the main process, which keeps the store, is gone
        fail(f"the main process ended while the others waited for it to prepare the data ({str(error).splitlines()[0]})")
