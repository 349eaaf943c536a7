"""What every workload does with its data: read it once, share it out, fetch it ahead.

Knows no framework; images.py and words.py read the files.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class DataError(Exception):
    """Data is not there or damaged; the message says what to do."""


def shards(count: int, batch: int, *, rank: int, ranks: int, seed: int) -> Iterator[NDArray[Any]]:
    """Yield which samples a rank takes in each step of an epoch; a short last batch is left out.

    All ranks draw the same order, so a batch holds the same samples whatever their number.
    """
    order = np.random.default_rng(seed).permutation(count)
    for begin in range(0, count - batch + 1, batch):
        yield order[begin : begin + batch][rank::ranks]


def prefetch(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """Yield the items, made by a thread that is up to `depth` of them ahead."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    left = threading.Event()

    def put(*item: Any) -> None:
        while not left.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(True, item)
                if left.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            more, item = ready.get()
            if more:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        left.set()


def shared(read: Callable[[], T], hvd: Any) -> T:
    """Let rank 0 read, and give what it has read to all; its DataError is raised on every rank.

    Every rank opening the same small files is what brings a parallel file system down.
    """
    found: T | DataError | None = None
    if hvd.rank() == 0:
        try:
            found = read()
        except DataError as error:
            found = error
    everywhere: T | DataError = hvd.broadcast_object(found, root_rank=0)
    if isinstance(everywhere, DataError):
        raise everywhere
    return everywhere


def absent(what: str, folder: Path | None, files: str) -> DataError:
    where = f"there are none in {folder}" if folder else "neither --data nor QSGD_DATA is given"
    return DataError(
        f"{what}: {where}. Name a folder with {files} by --data DIR, or train on made-up data with "
        "--synthetic."
    )


def check_batch(batch: int, count: int, ranks: int) -> int:
    """Return the steps of an epoch of `count` samples.

    Raises:
        DataError: a rank would be left without a sample, or there is no whole batch.
    """
    if batch < ranks or count < batch:
        raise DataError(
            f"a batch of {batch} over {ranks} rank(s) does not fit {count} samples: choose a "
            f"--global-batch-size between {ranks} and {count}, or more data"
        )
    return count // batch
