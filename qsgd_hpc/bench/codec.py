"""``qsgd-hpc bench codec``: coding in one process, beside the least that it must read or write."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.text import Text

from qsgd_hpc import __version__
from qsgd_hpc.bench.samples import Timing
from qsgd_hpc.bench.words import rate_text, size_text, time_text

__all__ = ["Request", "run"]

SCHEMA = 1
FLOAT_BYTES = 4
HEADER_BYTES = 32  # of a wire message
SCAN, ADD = "max-abs scan", "y += x"
FORM = "{:14}  {:40}  {:>7}  {:>9}  {:>9}  {:>9}  {:>6}  {}"


@dataclass(frozen=True)
class Request:
    """What to measure; each spec is the keyword arguments of a CodecSpec."""

    size_bytes: int
    specs: Sequence[dict[str, Any]]
    threads: Sequence[int]
    rounds: int = 7
    json_path: Path | None = None


@dataclass
class Operation:
    """One thing to time over the whole buffer."""

    name: str
    run: Callable[[], object]
    code: str = ""
    threads: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return Timing.of(self.seconds).median_s


def operations(request: Request) -> list[Operation]:
    """Return the bare scans first, then each code's encode, decode and decode-add."""
    from qsgd_hpc import _core

    count = request.size_bytes // FLOAT_BYTES
    x = np.resize(
        np.random.default_rng(1).standard_normal(min(count, 1 << 20)).astype(np.float32), count
    )
    y = np.zeros(count, dtype=np.float32)
    found = [
        Operation(SCAN, lambda: _core.max_abs(x)),
        Operation(ADD, lambda: _core.add_into(y, x)),
    ]
    for keywords in request.specs:
        spec = _core.CodecSpec(**keywords)
        message = np.zeros(HEADER_BYTES + spec.bytes(count), dtype=np.uint8)
        for threads in request.threads:
            found += _of_code(_core, spec, message, x, y, threads)
    return found


def _of_code(core: Any, spec: Any, message: Any, x: Any, y: Any, threads: int) -> list[Operation]:
    code = repr(spec)
    return [
        Operation(
            "encode",
            lambda: core.encode_into(x, message, spec=spec, threads=threads),
            code,
            threads,
        ),
        Operation(
            "decode",
            lambda: core.decode_into(message, y, spec=spec, threads=threads),
            code,
            threads,
        ),
        Operation(
            "decode and add",
            lambda: core.decode_add_into(message, y, spec=spec, threads=threads),
            code,
            threads,
        ),
    ]


def time_all(found: Sequence[Operation], rounds: int, screen: Console) -> None:
    """Time the operations in turns; the first round warms up. A terminal sees a progress bar."""
    steps = track(
        range(rounds + 1),
        description=f"{len(found)} operations, in turns",
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    for number in steps:
        for operation in found:
            start_s = time.perf_counter()
            operation.run()
            if number > 0:
                operation.seconds.append(time.perf_counter() - start_s)


def ratio(operation: Operation, found: Sequence[Operation]) -> tuple[float, str] | None:
    """Return how fast an operation is, and beside what; None for the bare scans.

    On one thread that is the least it must do: an encoder reads every element once, an adding
    decoder reads and writes the sum once. On more it is the same code on one thread.
    """
    if not operation.code:
        return None
    if operation.threads > 1:
        base = next(
            (
                o
                for o in found
                if (o.name, o.code, o.threads) == (operation.name, operation.code, 1)
            ),
            None,
        )
        return None if base is None else (base.median_s / operation.median_s, "1 thread")
    name = SCAN if operation.name == "encode" else ADD
    base = next(o for o in found if o.name == name)
    return base.median_s / operation.median_s, name


def rows(request: Request, found: Sequence[Operation]) -> list[dict[str, Any]]:
    """Return one record per operation, as the JSON file holds them."""
    records = []
    for operation in found:
        timing = Timing.of(operation.seconds)
        beside = ratio(operation, found)
        records.append(
            {
                "operation": operation.name,
                "code": operation.code,
                "threads": operation.threads,
                **asdict(timing),
                "gb_per_s": request.size_bytes / timing.median_s / 1e9,
                "ratio": beside[0] if beside else None,
                "beside": beside[1] if beside else None,
            }
        )
    return records


def line(record: dict[str, Any]) -> Text:
    """Return a row of the table."""
    beside = f"{record['ratio']:.2f} of {record['beside']}" if record["ratio"] else ""
    if record["beside"] == "1 thread":
        beside = f"{record['ratio']:.2f} times 1 thread"
    return Text(
        FORM.format(
            record["operation"],
            record["code"] or "-",
            record["threads"],
            *(time_text(record[name]) for name in ("min_s", "median_s", "p99_s")),
            rate_text(record["gb_per_s"]),
            beside,
        ).rstrip(),
        style="" if record["code"] else "dim",
    )


def run(request: Request) -> None:
    """Measure, print the table and write the file."""
    screen = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    found = operations(request)
    screen.print(
        f"qsgd-hpc {__version__}: {size_text(request.size_bytes)} of float32, "
        f"{request.rounds} rounds; GB/s of float32"
    )
    time_all(found, request.rounds, screen)
    heads = ("operation", "code", "threads", "min", "median", "p99", "GB/s", "beside")
    screen.print(Text(FORM.format(*heads), style="bold"))
    records = rows(request, found)
    for record in records:
        screen.print(line(record), soft_wrap=True)
    if request.json_path is not None:
        file = {
            "schema": SCHEMA,
            "version": __version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "size_bytes": request.size_bytes,
            "rows": records,
        }
        request.json_path.write_text(json.dumps(file, indent=1) + "\n")
        screen.print(f"written: {request.json_path}")
