"""The verb ``qsgd-hpc run``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch import run as launch
from qsgd_hpc.launch.options import Host, RunOptions, parse_hostfile, parse_hosts

__all__ = ["run"]


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("-np", "-n", "ranks", type=int, required=True, metavar="N", help="Ranks to start.")
@click.option("-H", "--hosts", metavar="h1:2,h2:2", help="Hosts and how many ranks each takes.")
@click.option(
    "--hostfile", type=click.Path(path_type=Path), help="Hosts, one a line: h1 slots=2, or h1:2."
)
@click.option("--bits", type=int, metavar="2|4|8|32", help="Bits per gradient element; 32 is off.")
@click.option(
    "--ranks-per-node", type=int, metavar="R", help="Treat each run of R ranks as one node."
)
@click.option("--prefix-output", is_flag=True, help="Put [rank] before every line.")
@click.option("--env", "env", multiple=True, metavar="K=V", help="Set a variable for the ranks.")
@click.option("--mpi-args", default="", metavar="'...'", help="More options for mpiexec.")
@click.option("--dry-run", is_flag=True, help="Print the command and its variables; run nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Say which MPI and which mpiexec.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int,
    hosts: str | None,
    hostfile: Path | None,
    bits: int | None,
    ranks_per_node: int | None,
    prefix_output: bool,
    env: tuple[str, ...],
    mpi_args: str,
    dry_run: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND on N ranks with the MPI that mpi4py uses.

    Options of run come first; everything from COMMAND on belongs to it. A script that ends in .py
    needs no "python" before it.

    \b
    Two ranks here, gradients in 4 bits:
      qsgd-hpc run -np 2 --bits 4 train.py --epochs 3
    Four ranks on two hosts, every line marked with its rank:
      qsgd-hpc run -np 4 -H node1:2,node2:2 --prefix-output train.py
    See what would be run, as if on two nodes of two ranks:
      qsgd-hpc run -np 4 --ranks-per-node 2 --dry-run train.py

    When a rank fails, the message names the first one, and its exit code (128 + signal) becomes
    that of run; the others have QSGD_RUN_GRACE_S (25) seconds to end. Ctrl-C ends every rank.
    Ranks read /dev/null as stdin. OMP_NUM_THREADS is cores / ranks per host unless it is set.
    """
    faults: list[str] = []
    where: tuple[Host, ...] = ()
    variables: dict[str, str] = {}
    if hosts is not None and hostfile is not None:
        faults.append("-H and --hostfile exclude each other; give one")
    else:
        try:
            where = _hosts(hosts, hostfile)
        except UsageError as error:
            faults.append(str(error))
    for pair in env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            faults.append(f"--env {pair!r}: expected NAME=VALUE")
        variables[name] = value
    try:
        extra = tuple(shlex.split(mpi_args))
    except ValueError as error:
        faults.append(f"--mpi-args {mpi_args!r}: {error}")
        extra = ()
    options = RunOptions(
        ranks=ranks,
        command=command,
        hosts=where,
        bits=bits,
        ranks_per_node=ranks_per_node,
        prefix_output=prefix_output,
        env=variables,
        mpi_args=extra,
        verbose=verbose,
    )
    if faults:
        raise UsageError("\n".join(faults))
    if dry_run:
        _show(options)
    else:
        sys.exit(launch(options))


def _hosts(hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    if hosts is not None:
        return parse_hosts(hosts)
    return () if hostfile is None else parse_hostfile(hostfile)


def _show(options: RunOptions) -> None:
    from qsgd_hpc.launch.run import plan

    checked = plan(options)
    command = checked.command()
    click.echo(f"# {checked.library.name}; {checked.launcher.version}")
    for name, value in command.env.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(shlex.join(command.argv))
