"""The command ``qsgd-hpc run``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from qsgd_hpc import __version__
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.frameworks import FRAMEWORKS
from qsgd_hpc.launch.horovod_flags import (
    GROUP,
    effects,
    horovod_options,
    refuse_discovery,
)
from qsgd_hpc.launch.mpi import find_launcher, find_library
from qsgd_hpc.launch.option_types import (
    GroupedCommand,
    GroupedOption,
    TranslatingCommand,
    training_options,
)
from qsgd_hpc.launch.options import RunOptions, chosen_hosts
from qsgd_hpc.launch.rendezvous import rendezvous
from qsgd_hpc.launch.run import plan
from qsgd_hpc.launch.run import run as launch

__all__ = ["build_table", "run"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
where: Callable[..., Decorator] = partial(click.option, cls=GroupedOption, group="Ranks and hosts")
output: Callable[..., Decorator] = partial(click.option, cls=GroupedOption, group="Output")
PATH = click.Path(path_type=Path)


def _check_build(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(build_table())
        ctx.exit()


# What torchrun's flags are in ``qsgd-hpc run``, for those who type them from habit.
_FOREIGN = {
    "torchrun": {
        "--nproc-per-node": "-np takes the number of all ranks, and -H h1:2,h2:2 that of each host",
        "--nnodes": "name the hosts with -H h1:2,h2:2, or use `qsgd-hpc submit --nodes`",
        "--node-rank": "start run once, on any host: it starts the ranks of all hosts",
        "--max-restarts": "leave it out: failed ranks are not restarted",
        "--shutdown-timeout": "set QSGD_RUN_GRACE_S, in seconds",
        "--numa-binding": "give mpiexec's own options in --binding-args",
        "--no-python": "write the program in place of the script",
        "--run-path": "leave it out, and write the script after the options",
        "-m --module": "put python -m MODULE after the options",
        "--standalone --master-addr --master-port --local-addr"
        " --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf": (
            "leave it out: run decides where the ranks meet"
        ),
        "--log-dir --logs-specs --redirects -r --tee -t --local-ranks-filter"
        " --duplicate-stdout-filters --duplicate-stderr-filters": (
            "use --output-filename FOLDER for files of each rank, --prefix-output for its number"
        ),
        "--monitor-interval --role --start-method --event-log-handler --signals-to-handle"
        " --virtual-local-rank": "leave it out: run does without",
    }
}


class _Run(TranslatingCommand, GroupedCommand):
    foreign = _FOREIGN


@click.command(
    cls=_Run, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False}
)
@where(
    "-np",
    "-n",
    "--num-proc",
    "ranks",
    type=int,
    required=True,
    metavar="N",
    help="Number of ranks.",
)
@where("-H", "--hosts", metavar="h1:2,h2:2", help="Hosts and the number of ranks on each.")
@where(
    "--hostfile", "-hostfile", type=PATH, help="File with one host per line: h1 slots=2, or h1:2."
)
@where("--ranks-per-node", type=int, metavar="R", help="Treat R consecutive ranks as one node.")
@where(
    "--network",
    metavar="RATE[,latency=T]",
    help="Emulate a host for each node on this machine; links of 100mbit, 1gbit, ...",
)
@where(
    "--network-interfaces",
    "--network-interface",
    default="",
    metavar="eth0,...",
    help="Network interfaces to use.",
)
@where(
    "--start-timeout",
    type=float,
    metavar="S",
    help="Time limit for the start of all ranks, in seconds.",
)
@where(
    "--env", "env", multiple=True, metavar="K=V", help="Set an environment variable for the ranks."
)
@where("--mpi-args", default="", metavar="'...'", help="More options for mpiexec.")
@where(
    "--binding-args", default="", metavar="'...'", help="Options of mpiexec for binding to cores."
)
@where("--dry-run", is_flag=True, help="Print the command and its variables without running it.")
@where(
    "--check-build",
    "-cb",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_check_build,
    help="Print the available frameworks and MPI, and exit.",
)
@where("--host-discovery-script", hidden=True)
@click.version_option(__version__, prog_name="qsgd-hpc", hidden=True)
@training_options(cls=GroupedOption, group="Training")
@output("--prefix-output", is_flag=True, help="Put [rank] before every line.")
@output(
    "--prefix-output-with-timestamp",
    "-prefix-timestamp",
    "timestamps",
    is_flag=True,
    help="Put date, time and [rank] before every line.",
)
@output(
    "--output-filename",
    type=PATH,
    metavar="FOLDER",
    help="Also write the output to FOLDER/rank.N/stdout and stderr.",
)
@output("-v", "--verbose", is_flag=True, help="Print the MPI and the mpiexec in use.")
@click.option(
    "--config-file",
    type=PATH,
    cls=GroupedOption,
    group=GROUP,
    help="YAML file of the settings below.",
)
@horovod_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)  # fmt: skip
def run(
    ranks: int,
    hosts: str | None,
    hostfile: Path | None,
    bits: int | str | None,
    weight_bits: int | None,
    horovod: bool,
    torchrun: bool | None,
    ranks_per_node: int | None,
    network: str | None,
    network_interfaces: str,
    start_timeout: float | None,
    prefix_output: bool,
    timestamps: bool,
    output_filename: Path | None,
    env: tuple[str, ...],
    mpi_args: str,
    binding_args: str,
    dry_run: bool,
    verbose: bool,
    host_discovery_script: str | None,
    config_file: Path | None,
    command: tuple[str, ...],
    **horovods: Any,
) -> None:
    """Start COMMAND on N ranks with the MPI that mpi4py uses.

    Options of run precede COMMAND; all later arguments are passed to it. "python" can be omitted
    before a script that ends in .py.

    \b
    Two ranks on this machine, gradients in 4 bits:
      qsgd-hpc run -np 2 --bits 4 train.py --epochs 3
    An unchanged Horovod script:
      qsgd-hpc run -np 2 --horovod --bits 4 train.py
    An unchanged script for torchrun (DDP, FSDP2, Lightning, Accelerate, Trainer):
      qsgd-hpc run -np 2 train_ddp.py
    Four ranks on two hosts, with the rank before each line of output:
      qsgd-hpc run -np 4 -H node1:2,node2:2 --prefix-output train.py
    Four emulated hosts on this machine, joined at 1 Gb/s:
      qsgd-hpc run -np 4 --network 1gbit --bits 4 train.py
    Show the command for two nodes with two ranks each:
      qsgd-hpc run -np 4 --ranks-per-node 2 --dry-run train.py

    If a rank fails, run names the first one and exits with its exit code (or 128 + signal); the
    other ranks have QSGD_RUN_GRACE_S (22) seconds to end. Ctrl-C ends all ranks. The stdin of ranks
    is /dev/null; with "python - < train.py" each rank gets the program. OMP_NUM_THREADS defaults to
    cores / ranks per host. Other flags of horovodrun are accepted; for each, run prints why it has
    no effect.
    """
    faults: list[str] = []
    checked = partial(_checked, faults)
    checked(
        lambda: refuse_discovery(
            host_discovery_script, "--host-discovery-script", "with -H", "-np"
        ),
        None,
    )
    settings, config_verbose, remarks = checked(
        lambda: effects(horovods, config_file), ({}, False, [])
    )
    options = RunOptions(
        ranks=ranks,
        command=command,
        hosts=checked(lambda: chosen_hosts(hosts, hostfile), ()),
        bits=bits,
        weight_bits=weight_bits,
        ranks_per_node=ranks_per_node,
        network=checked(lambda: parse_network(network), None),
        prefix_output=prefix_output,
        env=settings | checked(lambda: _variables(env), {}),
        mpi_args=checked(lambda: _words("--mpi-args", mpi_args), ())
        + checked(lambda: _words("--binding-args", binding_args), ()),
        network_interfaces=tuple(filter(None, network_interfaces.split(","))),
        horovod=horovod,
        torchrun=torchrun,
        output_folder=output_filename,
        timestamps=timestamps,
        start_timeout_s=start_timeout,
        verbose=verbose or config_verbose,
    )
    if faults:
        raise UsageError("\n".join(faults))
    for remark in remarks:
        click.echo(f"qsgd-hpc run: {remark}; the flag has no effect", err=True)
    if dry_run:
        _show(options)
    else:
        sys.exit(launch(options))


def _checked(faults: list[str], parse: Callable[[], Any], otherwise: Any) -> Any:
    """Return the result of ``parse``; collect its error, so that all are reported together."""
    try:
        return parse()
    except UsageError as error:
        faults.append(str(error))
        return otherwise


def _variables(pairs: tuple[str, ...]) -> dict[str, str]:
    wrong = [pair for pair in pairs if not pair.partition("=")[0] or "=" not in pair]
    if wrong:
        raise UsageError("\n".join(f"--env {pair!r}: expected NAME=VALUE" for pair in wrong))
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None


def _show(options: RunOptions) -> None:
    checked = plan(options)
    with rendezvous(checked.options, os.environ) as place:
        command = checked.command(place=place)
    click.echo(f"# {checked.library.name}; {checked.launcher.version}")
    for name, value in command.env.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(shlex.join(command.argv))


def build_table() -> str:
    """Return the output of --check-build: frameworks, launcher and transport."""
    sections = {
        "Frameworks with an API here": [
            (each.title, find_spec(each.module) is not None) for each in FRAMEWORKS
        ],
        "Ranks are started by": [(f"MPI: {_mpi()}", True), ("Gloo", False)],
        "Messages go through": [
            ("MPI", True),
            ("shared memory within a node", True),
            ("NCCL, for tensors on GPUs", _has_nccl()),
            ("DDL", False),
            ("CCL", False),
            ("Gloo", False),
        ],
    }
    lines = [f"qsgd-hpc {__version__}"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if has else ' '}] {name}" for name, has in rows)]
    return "\n".join(lines)


def _has_nccl() -> bool:
    # In a separate process, as in a rank: the launcher itself must not load the core.
    question = "from qsgd_hpc.runtime import gpu; raise SystemExit(not gpu.nccl_version())"
    return subprocess.run([sys.executable, "-c", question], capture_output=True).returncode == 0


def _mpi() -> str:
    try:
        library = find_library()
        return f"{library.name}, {find_launcher(library).path}"
    except UsageError as error:
        return f"none ({error})"


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
