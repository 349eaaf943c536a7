"""Write each rank's output to separate files."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from qsgd_hpc.errors import UsageError

__all__ = ["RankFiles"]


class RankFiles:
    """``FOLDER/rank.N/stdout`` and ``stderr``, N padded with zeros so that folders sort by rank.

    Args:
        folder: created if needed; files of an earlier run are overwritten.
        ranks: number of ranks.

    Raises:
        UsageError: the folder or a file in it cannot be written.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files: dict[tuple[int, bool], BinaryIO] = {}
        width = len(str(ranks - 1))
        try:
            for rank in range(ranks):
                own = folder / f"rank.{rank:0{width}}"
                own.mkdir(parents=True, exist_ok=True)
                for is_stderr, name in ((False, "stdout"), (True, "stderr")):
                    self._files[rank, is_stderr] = (own / name).open("wb", buffering=0)
        except OSError as error:
            raise UsageError(f"--output-filename {folder}: {error.strerror or error}") from None

    def write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Append bytes that a rank wrote."""
        self._files[rank, is_stderr].write(data)

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()
