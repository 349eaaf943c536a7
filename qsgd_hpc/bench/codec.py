"""``qsgd-hpc bench codec``: coding in one process, compared with simple loops over memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.text import Text

from qsgd_hpc import __version__
from qsgd_hpc.bench.table import Timing, write_json
from qsgd_hpc.bench.words import FLOAT_BYTES, rate_text, size_text, time_text

__all__ = ["Request", "run"]

FLOAT32 = "float32"
DTYPES = (FLOAT32, "float16", "bfloat16")
HEADER_BYTES = 32  # of a wire message
SCAN, ADD = "max-abs scan", "y += x"
FEEDBACK = "encode, feedback"
FORM = "{:16}  {:40}  {:>7}  {:>9}  {:>9}  {:>9}  {:>6}  {}"


@dataclass(frozen=True)
class Request:
    """Options of the benchmark; each spec is the keyword arguments of a CodecSpec."""

    size_bytes: int
    specs: Sequence[dict[str, Any]]
    threads: Sequence[int]
    dtypes: Sequence[str] = (FLOAT32,)
    instruction_set: str | None = None
    """One of ``_core.instruction_sets()``; None takes the fastest."""
    rounds: int = 7
    json_path: Path | None = None


@dataclass
class Operation:
    """One operation to time over the whole buffer."""

    name: str
    run: Callable[[], object]
    code: str = ""
    threads: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return Timing.of(self.seconds).median_s


def operations(request: Request) -> list[Operation]:
    """Return the simple loops first, then each code's encode, decode and decode-add.

    All process ``size_bytes`` of elements, of any type.
    """
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
    for dtype in request.dtypes:
        source, target = (x, y) if dtype == FLOAT32 else (as_type(x, dtype), as_type(y, dtype))
        for keywords in request.specs:
            spec = _core.CodecSpec(**keywords)
            message = np.zeros(HEADER_BYTES + spec.bytes(source.size), dtype=np.uint8)
            for threads in request.threads:
                found += _of_code(_core, spec, message, source, target, dtype, threads)
    return found


def as_type(x: Any, dtype: str) -> Any:
    """Return an array of a 16-bit type with as many bytes as x, for `_core`."""
    if dtype == "float16":
        half = x.astype(np.float16)
    else:
        half = (x.view(np.uint32) >> 16).astype(np.uint16)
    return np.concatenate([half, half])


def _of_code(
    core: Any, spec: Any, message: Any, x: Any, y: Any, dtype: str, threads: int
) -> list[Operation]:
    code = repr(spec)

    def operation(name: str, run: Callable[[], object]) -> Operation:
        return Operation(name if dtype == FLOAT32 else f"{name} {dtype}", run, code, threads)

    options = {"spec": spec, "threads": threads}
    found = [
        operation("encode", lambda: core.encode_into(x, message, dtype=dtype, **options)),
        operation("decode", lambda: core.decode_into(message, y, dtype=dtype, **options)),
    ]
    if dtype == FLOAT32:
        left = np.zeros(x.size, dtype=np.float32)
        found += [
            operation(FEEDBACK, lambda: core.encode_into(x, message, left=left, **options)),
            operation("decode and add", lambda: core.decode_add_into(message, y, **options)),
        ]
    return found


def time_all(found: Sequence[Operation], rounds: int, screen: Console) -> None:
    """Time the operations alternately after a warm-up round; a terminal shows a progress bar."""
    steps = track(
        range(rounds + 1),
        description=f"{len(found)} operations, alternating",
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
    """Return the relative speed of an operation and its reference; None for the simple loops.

    On one thread, the reference is a simple compiled loop over the same memory: encoders read every
    element once; encoders with error feedback also read and write the residuals, as decoders do the
    sum. On several threads, it is the same operation on one thread.
    """
    if not operation.code:
        return None
    if operation.threads > 1:
        same = [o for o in found if (o.name, o.code) == (operation.name, operation.code)]
        alone = [o for o in same if o.threads == 1]
        return (alone[0].median_s / operation.median_s, "1 thread") if alone else None
    scans = operation.name.startswith("encode") and operation.name != FEEDBACK
    name = SCAN if scans else ADD
    base = next(o for o in found if o.name == name)
    return base.median_s / operation.median_s, name


def rows(request: Request, found: Sequence[Operation]) -> list[dict[str, Any]]:
    """Return one record per operation, in their JSON form."""
    records = []
    for operation in found:
        timing = Timing.of(operation.seconds)
        compared = ratio(operation, found)
        records.append(
            {
                "operation": operation.name,
                "code": operation.code,
                "threads": operation.threads,
                **asdict(timing),
                "gb_per_s": request.size_bytes / timing.median_s / 1e9,
                "ratio": compared[0] if compared else None,
                "beside": compared[1] if compared else None,
            }
        )
    return records


def line(record: dict[str, Any]) -> Text:
    """Return a row of the table."""
    compared = f"{record['ratio']:.2f} of {record['beside']}" if record["ratio"] else ""
    if record["beside"] == "1 thread":
        compared = f"{record['ratio']:.2f} times 1 thread"
    return Text(
        FORM.format(
            record["operation"],
            record["code"] or "-",
            record["threads"],
            *(time_text(record[name]) for name in ("min_s", "median_s", "p99_s")),
            rate_text(record["gb_per_s"]),
            compared,
        ).rstrip(),
        style="" if record["code"] else "dim",
    )


@contextlib.contextmanager
def instruction_set(name: str | None) -> Iterator[str]:
    """Select this instruction set, or the fastest.

    Raises:
        UsageError: this machine does not support it.
    """
    from qsgd_hpc import _core

    fastest = _core.instruction_sets()[0]
    _core.use_instruction_set(name or fastest)
    try:
        yield name or fastest
    finally:
        _core.use_instruction_set(fastest)


def run(request: Request) -> None:
    """Measure, print the table and write the file."""
    screen = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    with instruction_set(request.instruction_set) as chosen:
        found = operations(request)
        screen.print(
            f"qsgd-hpc {__version__}: {size_text(request.size_bytes)} of "
            f"{', '.join(request.dtypes)}, {request.rounds} rounds, {chosen}; GB/s of "
            "uncompressed data"
        )
        time_all(found, request.rounds, screen)
    heads = ("operation", "code", "threads", "min", "median", "p99", "GB/s", "beside")
    screen.print(Text(FORM.format(*heads), style="bold"))
    records = rows(request, found)
    for record in records:
        screen.print(line(record), soft_wrap=True)
    if request.json_path is not None:
        sized = {"size_bytes": request.size_bytes, "instruction_set": chosen, "rows": records}
        screen.print(write_json(request.json_path, sized))
