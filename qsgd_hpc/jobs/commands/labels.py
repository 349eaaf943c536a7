"""Output of many ranks in one file: find the rank of each line, follow one rank."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from qsgd_hpc.errors import UsageError

__all__ = ["Output", "rank_lines"]

# The labels of launchers: `[3] ` of `qsgd-hpc run` and MPICH, ` 3: ` of srun, `[1,3]<stdout>:` of
# Open MPI.
_LABEL = re.compile(rb"(?:\[ *(\d+)\] |\[\d+,(\d+)\]<std(?:out|err)>: ?|^ *(\d+): )")


def rank_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (rank, line without its label) for the labelled lines.

    A carriage return, as of a progress bar, ends no line: launchers put no label behind it.
    """
    for line in io.BytesIO(data):
        if label := _LABEL.match(line):
            yield int(next(number for number in label.groups() if number)), line[label.end() :]


class Output:
    """A job's output file; each call prints its new lines.

    Args:
        path: the file; it need not exist yet.
        rank: print the lines of this rank only; None: the whole file.
        ranks: number of ranks of the job.

    Raises:
        UsageError: the job has no such rank.
    """

    def __init__(self, path: Path, rank: int | None, ranks: int) -> None:
        if rank is not None and not 0 <= rank < ranks:
            raise UsageError(f"--rank {rank}: the job has ranks 0 to {ranks - 1}.")
        self._path = path
        # Lines of a single rank have no labels.
        self._rank = None if ranks == 1 else rank
        self._position = 0
        self.labelled = ranks == 1
        """Whether a line with a rank label was found."""

    def print_new(self, *, last: bool = False) -> None:
        """Copy the file's new content since the last call to standard output.

        An unfinished line of one rank is held back; with ``last``, it is printed as it is.
        """
        if not self._path.exists():
            return
        out = sys.stdout.buffer
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            while block := stream.read(1 << 16):
                if self._rank is not None:
                    block += stream.readline()  # only the beginning of a line has a label
                    lines = block if last else block[: block.rfind(b"\n") + 1]
                    for rank, line in rank_lines(lines):
                        self.labelled = True
                        if rank == self._rank:
                            out.write(line)
                    self._position += len(lines)
                    if lines != block:
                        break
                else:
                    out.write(block)
                    self._position += len(block)
        out.flush()
