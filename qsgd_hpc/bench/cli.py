"""The command ``qsgd-hpc bench``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsgd_hpc.bench.words import parse_bits, parse_sizes, parse_specs
from qsgd_hpc.cli import Finite
from qsgd_hpc.env import COMPRESSED, EXACT
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.claims import claims
from qsgd_hpc.launch.command import usable_cores

if TYPE_CHECKING:
    from qsgd_hpc.bench.allreduce import Request
    from qsgd_hpc.launch.cluster import Network

__all__ = ["bench"]


def _in_a_folder(_ctx: click.Context, _param: click.Parameter, file: Path | None) -> Path | None:
    """Reject a file that cannot be written now, not after the measurements."""
    if file is None:
        return None
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--json {file}: there is no such folder; create it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--json {file}: no files can be created in this folder")
    return file


_json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_in_a_folder,
    help="File for all numbers, as JSON.",
)


def launched(environ: Mapping[str, str], asked: int | None = None) -> bool:
    """Return whether a launcher started this process as one of the ranks to measure.

    Args:
        environ: the process's environment.
        asked: the number of ranks to start. A shell that ``srun`` started is one rank, from which
            more can be started.
    """
    found = claims(environ)
    alone = asked is not None and any(claim.exact for claim in found)
    return any(claim.ranks > 1 for claim in found) if alone else bool(found)


@click.group(context_settings={"show_default": True}, invoke_without_command=True)
@click.option(
    "--explain",
    is_flag=False,
    flag_value="",
    metavar="[SIZES]",
    help="Print the plan and its reasons; with SIZES, also the measured times of every choice.",
)
@click.option("-np", "-n", "ranks", type=int, metavar="N", help="Number of ranks for --explain.")
@click.option("--network", metavar="RATE", help="Link rate of emulated hosts for --explain.")
@click.pass_context
def bench(
    context: click.Context, explain: str | None, ranks: int | None, network: str | None
) -> None:
    """Benchmark codecs and allreduces, compared with the machine's limits and with MPI and gloo.

    \b
    Speed of the codecs on one core and on all:
      qsgd-hpc bench codec
    Speed of allreduces, compared with MPI_Allreduce and gloo:
      qsgd-hpc bench allreduce -np 2 --sizes 4K:64M --peers
    Sizes for which compression saves time here, with reasons:
      qsgd-hpc bench --explain -np 2
    Predicted and measured times of 1 MB in every code by every algorithm, on four emulated hosts
    joined at 1 Gb/s:
      qsgd-hpc bench --explain 1M -np 4 --network 1gbit
    """
    if context.invoked_subcommand is None:
        if explain is None:
            click.echo(context.get_help())
            return
        trial = {"sizes": explain, "trial": True} if explain else {}
        context.invoke(allreduce, explain=True, ranks=ranks, network=network, **trial)


@bench.command(context_settings={"show_default": True})
@click.option("--size", default="256M", help="Size of the buffer.")
@click.option("--bits", default="8,4,2", help="Comma-separated, 1 to 8.")
@click.option("--scheme", default="qsgd", help="Comma-separated: qsgd, eden, minmax, ...")
@click.option("--norm", default="max", help="Comma-separated: max, l2; for qsgd.")
@click.option("--dtype", default="float32", help="Comma-separated: float32, float16, bfloat16.")
@click.option("--threads", help="Comma-separated numbers. [default: 1 and all cores]")
@click.option(
    "--instruction-set", metavar="NAME", help="avx512, avx2, neon, scalar. [default: the fastest]"
)
@click.option("--rounds", type=click.IntRange(1), default=7, help="Samples per row.")
@_json_option
def codec(
    size: str,
    bits: str,
    scheme: str,
    norm: str,
    dtype: str,
    threads: str | None,
    instruction_set: str | None,
    rounds: int,
    json_path: Path | None,
) -> None:
    """Benchmark encode, decode and decode-and-add in one process.

    Each is compared with a simple loop over the same memory in the same run: encoders with a scan
    for the largest magnitude; decoders, and encoders with error feedback, which read and write
    residuals, with y += x; several threads with one. All operations alternate. Times include
    computing or checking the checksum.

    \b
    The measurements in benchmarks/:
      qsgd-hpc bench codec --size 256M --bits 8,4
    The cost of the paper's norm:
      qsgd-hpc bench codec --norm max,l2 --threads 1
    Other schemes:
      qsgd-hpc bench codec --scheme minmax,terngrad,topk --threads 1
    16-bit gradients, without AVX-512:
      qsgd-hpc bench codec --dtype float16,bfloat16 --instruction-set avx2
    """
    from qsgd_hpc.bench.codec import DTYPES, Request, run

    sizes = parse_sizes(size)
    if len(sizes) != 1:
        raise UsageError(f"--size {size}: only one size is possible")
    request = Request(
        size_bytes=sizes[0],
        specs=parse_specs(scheme, bits, norm),
        threads=_thread_counts(threads),
        dtypes=_dtypes(dtype, DTYPES),
        instruction_set=instruction_set,
        rounds=rounds,
        json_path=json_path,
    )
    run(request)


def _dtypes(text: str, known: tuple[str, ...]) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise UsageError(f"--dtype {text}: {unknown[0]!r} is not one of {', '.join(known)}")
    return words


def _thread_counts(text: str | None) -> list[int]:
    cores = usable_cores()
    if text is None:
        return [1] if cores == 1 else [1, cores]
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UsageError(
            f"--threads {text}: expected comma-separated numbers of at least 1, such as 1,4"
        )
    return sorted({int(word) for word in words})


@bench.command(context_settings={"show_default": True})
@click.option("-np", "-n", "ranks", type=int, metavar="N", help="Start N ranks on this machine.")
@click.option(
    "--network",
    metavar="RATE[,latency=T]",
    help="Emulate a host for each rank; links of 100mbit, 1gbit, ...",
)
@click.option("--sizes", default="4K:64M", help="FROM:TO[:FACTOR], or comma-separated sizes.")
@click.option(
    "--bits",
    default="32,8,4,2",
    help="Comma-separated: 1 to 8, 32 (float32), auto (the planner's choice).",
)
@click.option("--scheme", default="qsgd", help="Comma-separated: qsgd, eden, minmax, ...")
@click.option(
    "--algorithm",
    default="auto",
    help=f"Comma-separated. Exact: {', '.join(EXACT)}. Compressed: {', '.join(COMPRESSED)}.",
)
@click.option("--peers", is_flag=True, help="Also measure MPI_Allreduce and torch's gloo.")
@click.option("--explain", is_flag=True, help="Print the plan per size and its reasons instead.")
@click.option("--trial", is_flag=True, help="With --explain: also measure every choice.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads per rank. [default: OMP_NUM_THREADS or 1]"
)
@click.option(
    "--bandwidth",
    type=Finite(0, min_open=True),
    metavar="GBPS",
    help="Link rate of a rank in Gb/s, for the limit. [default: of --network, else measured]",
)
@click.option("--rounds", type=click.IntRange(1), help="Samples per row. [default: by time]")
@click.option("--seconds", type=Finite(0), default=2.0, help="Time per size; at least 5 rounds.")
@_json_option
def allreduce(
    ranks: int | None,
    network: str | None,
    sizes: str,
    bits: str,
    scheme: str,
    algorithm: str,
    peers: bool,
    explain: bool,
    trial: bool,
    threads: int | None,
    bandwidth: float | None,
    rounds: int | None,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Benchmark allreduces of float32, compressed and uncompressed.

    With -np, ranks are started on this machine; with --network, on emulated hosts. On several real
    hosts, start it like any MPI program: with mpiexec, srun, or qsgd-hpc run -np 4 -H h1:2,h2:2
    python -m qsgd_hpc bench allreduce.

    \b
    The measurements in benchmarks/, with MPI_Allreduce and gloo:
      qsgd-hpc bench allreduce -np 2 --sizes 4K:256M --peers --json fp32.json
    The same on four emulated hosts, joined at 1 Gb/s:
      qsgd-hpc bench allreduce -np 4 --network 1gbit --sizes 64K,1M,16M,100M --peers
    Two compressed algorithms:
      qsgd-hpc bench allreduce -np 4 --bits 4 --algorithm sra,allgather --sizes 64K,1M
    Two codes, QSGD and EDEN:
      qsgd-hpc bench allreduce -np 4 --network 1gbit --bits 4,3 --scheme qsgd,eden --sizes 16M
    Whether compression saves time here:
      qsgd-hpc bench allreduce -np 2 --explain
    The plan for two codes, compared with measurements:
      qsgd-hpc bench allreduce -np 2 --explain --trial --bits 32,4 --sizes 64K,1M

    All contestants of a size alternate, so that disturbances affect them equally. A sample is the
    slowest rank's time after a barrier; small sizes are called several times per sample.

    "engine" and "feedback" rows include the engine's negotiation of a named tensor. Rows use error
    feedback where training does: for 2 and 1 bits, and for all with QSGD_ERROR_FEEDBACK=on.
    """
    from qsgd_hpc.bench.allreduce import Request, check, run
    from qsgd_hpc.launch.cluster import parse as parse_network

    joined = parse_network(network)
    if bandwidth is None and joined is not None:
        bandwidth = joined.rate_bits_s / 1e9
    request = Request(
        sizes=parse_sizes(sizes),
        bits=parse_bits(bits),
        schemes=tuple(name.strip() for name in scheme.split(",")),
        algorithms=tuple(name.strip() for name in algorithm.split(",")),
        peers=peers,
        explain=explain,
        trial=trial,
        json_path=json_path,
        bandwidth_gbps=bandwidth,
        rounds=rounds,
        seconds=seconds,
        threads=threads or int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0] or 1),
    )
    check(request)
    if launched(os.environ, ranks):
        if joined is not None:
            raise UsageError(
                f"--network {network}: these ranks are already started; use the option with "
                "bench allreduce -np 2, or with qsgd-hpc run"
            )
        run(request)
        return
    if ranks is None:
        raise UsageError(
            "bench allreduce needs ranks: pass -np 2, or start it with mpiexec or qsgd-hpc run"
        )
    if ranks < 2:
        raise UsageError(f"-np {ranks}: at least 2 ranks are needed")
    words = ["--sizes", sizes, "--bits", bits, "--scheme", scheme, "--algorithm", algorithm]
    words += ["--threads", str(threads)] if threads else []
    sys.exit(_start(ranks, joined, request, words))


def _start(ranks: int, network: Network | None, request: Request, words: list[str]) -> int:
    """Run this command on ranks of this machine and return the exit code."""
    from qsgd_hpc.launch.options import RunOptions
    from qsgd_hpc.launch.run import run as launch

    words += ["--seconds", str(request.seconds)]
    words += ["--peers"] if request.peers else []
    words += ["--explain"] if request.explain else []
    words += ["--trial"] if request.trial else []
    words += ["--bandwidth", str(request.bandwidth_gbps)] if request.bandwidth_gbps else []
    words += ["--rounds", str(request.rounds)] if request.rounds else []
    words += ["--json", str(request.json_path.absolute())] if request.json_path else []
    command = (sys.executable, "-m", "qsgd_hpc", "bench", "allreduce", *words)
    return launch(RunOptions(ranks=ranks, command=command, network=network))


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
