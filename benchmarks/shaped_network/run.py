#!/usr/bin/env python3
"""Run a command on 1 to 16 hosts joined at a chosen bandwidth, one rank each. Needs root.

    sudo benchmarks/shaped_network/run.py --hosts 4 --rate 1gbit
    sudo benchmarks/shaped_network/run.py --hosts 2 --rate 10gbit -- python train.py
    sudo benchmarks/shaped_network/run.py --hosts 4 --cpus 0.5 -- python train.py

Without a command it runs the table of the README: qsgd-hpc bench allreduce --peers. Ctrl-C ends
the ranks and removes the hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from cpu_share import CpuShareError, shares
from network import LAUNCHER, SUBNET, NetworkError, Rate, host_name, network

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BENCH = ("-m", "qsgd_hpc.cli", "bench", "allreduce", "--peers", "--sizes", "64K,1M,16M,100M")
END_S = 10.0


def mpiexec_words(vendor: str, mpiexec: str, hosts: Sequence[str]) -> list[str]:
    """Return the launcher's command line up to the program: one rank per host."""
    enter, ranks = str(HERE / "enter_host.py"), str(len(hosts))
    if vendor == "Open MPI":
        return [
            mpiexec,
            *("--allow-run-as-root", "--host", ",".join(hosts), "--map-by", "node"),
            *("--prtemca", "plm_ssh_agent", enter, "--prtemca", "plm_ssh_no_tree_spawn", "1"),
            *("--prtemca", "prte_if_include", f"{SUBNET}.0/24", "--bind-to", "none"),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "mpi_yield_when_idle"),
            *("1", "--mca", "btl_tcp_if_include", f"{SUBNET}.0/24", "-n", ranks),
        ]
    return [
        mpiexec,
        *("-launcher", "ssh", "-launcher-exec", enter, "-localhost", LAUNCHER),
        *("-disable-hostname-propagation", "-hosts", ",".join(hosts), "-ppn", "1", "-n", ranks),
    ]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks' environment: TCP over eth0 only, one thread, nothing cached."""
    wanted = {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
        "MPIR_CVAR_NOLOCAL": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that these hosts have no names
        # The next network of these hosts may have another bandwidth.
        "QSGD_PLAN_CACHE": "0",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    return {**wanted, **environ, "PYTHONPATH": path}


def find_mpi(python: str) -> tuple[str, str]:
    """Return the vendor of the MPI that this Python loads, and its mpiexec."""
    sys.path.insert(0, str(ROOT))
    from qsgd_hpc.launch.mpi import find_launcher, find_library

    library = find_library(python)
    return library.vendor, str(find_launcher(library).path)


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the launcher to its end; an interruption ends it and all of its ranks."""
    process = subprocess.Popen(words, env=environ, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise


def _interrupt(signum: int, _: types.FrameType | None) -> None:
    raise KeyboardInterrupt(signum)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, help="1 to 16; default 4")
    parser.add_argument("--rate", default="1gbit", help="of each uplink; default 1gbit")
    parser.add_argument(
        "--cpus", type=float, help="share of a core that each host has, such as 0.5"
    )
    parser.add_argument("--python", default=sys.executable, help="decides which MPI is used")
    parser.add_argument("command", nargs="*", help="program and arguments, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not 1 <= options.hosts <= 16:
            raise NetworkError(f"--hosts {options.hosts}: expected 1 to 16")
        if options.cpus is not None and not 0.05 <= options.cpus <= 1:
            raise NetworkError(
                f"--cpus {options.cpus}: expected 0.05 to 1; each host runs one rank"
            )
        rate = Rate.parse(options.rate)
        vendor, mpiexec = find_mpi(options.python)
        limit = ("--bandwidth", str(rate.bits_per_s / 1e9))
        command = options.command or [options.python, *BENCH, *limit]
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(network(options.hosts, rate))
            environ = environment(os.environ)
            if options.cpus is not None:
                names = [host_name(number) for number in range(options.hosts)]
                environ.update(stack.enter_context(shares(names, options.cpus)))
            return run([*mpiexec_words(vendor, mpiexec, hosts), *command], environ)
    except (NetworkError, CpuShareError) as error:
        print(f"shaped_network: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shaped_network: interrupted; the hosts have been removed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
