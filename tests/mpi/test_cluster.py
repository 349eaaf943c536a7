"""Ranks on hosts of their own on this machine, joined by a network of a chosen rate."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.processes import until, without_settings

pytestmark = pytest.mark.usefixtures("hosts_of_their_own")
ROOT = Path(__file__).parents[2]
ON_PATH = {"PYTHONPATH": str(ROOT)}


def records_of(path: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


WHERE = """
import json, os, socket
from pathlib import Path
import qsgd_hpc.arrays as hvd
hvd.init()
spaces = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "ipc", "uts", "mnt")}
lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
links = [line.split(":")[0].strip() for line in lines]
names = Path("/etc/resolv.conf")
Path(f"/dev/shm/mine-{hvd.rank()}").touch()
hvd.allreduce(__import__("numpy").ones(4, "f4"), name="all are here")
found = {
    "host": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname()),
    "spaces": spaces, "links": sorted(links), "uid": os.getuid(), "local": hvd.local_rank(),
    "memory": sorted(p.name for p in Path("/dev/shm").glob("mine-*")), "cwd": os.getcwd(),
    "name_servers": names.read_text() if names.exists() else "",
}
Path(f"{os.environ['FOUND']}/{hvd.rank()}").write_text(json.dumps(found))
"""


@pytest.mark.gate
@pytest.mark.gate(mpi=2)
def test_each_node_is_a_host_of_its_own(run_ranks, tmp_path):
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    words = ("--network", "1gbit", "--ranks-per-node", "2", str(script))
    done = run_ranks(4, *words, cwd=tmp_path, FOUND=str(tmp_path), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [r["host"] for r in ranks] == ["node1", "node1", "node2", "node2"]
    assert [r["local"] for r in ranks] == [0, 1, 0, 1]
    assert [r["address"] for r in ranks[::2]] == ["10.77.0.1", "10.77.0.2"]
    assert all(r["links"] == ["eth0", "lo"] for r in ranks)
    assert not any(r["name_servers"] for r in ranks)  # none answers there
    # Shared memory is that of the host: its ranks see each other's, and no other's.
    assert [r["memory"] for r in ranks[::2]] == [["mine-0", "mine-1"], ["mine-2", "mine-3"]]
    assert ranks[0]["spaces"] == ranks[1]["spaces"]
    own = {kind: Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ranks[0]["spaces"]}
    for kind, number in own.items():
        assert len({number, ranks[0]["spaces"][kind], ranks[2]["spaces"][kind]}) == 3, kind
    assert all(r["uid"] == os.getuid() and r["cwd"] == str(tmp_path) for r in ranks)
    assert not list(Path("/dev/shm").glob("mine-*"))
    assert "node1 to node2 share" in done.stderr
    assert "cannot be named" not in done.stderr  # the ranks have connected to each other


SENDS = """
import sys, time
from qsgd_hpc.runtime.basics import communication_stats
import numpy, qsgd_hpc.arrays as hvd
hvd.init()
values = numpy.ones(int(sys.argv[1]), "f4")
hvd.allreduce(values[:8], name="first")
began = time.monotonic()
for i in range(4):
    hvd.allreduce(values, name=f"x{i}")
seconds = time.monotonic() - began
if hvd.rank() == 0:
    print("RESULT", seconds, communication_stats()["wire_bytes"], flush=True)
"""


@pytest.mark.gate
@pytest.mark.parametrize("rate", [100])
def test_bytes_take_as_long_as_at_that_rate_and_are_those_that_the_engine_counts(
    run_ranks, tmp_path, rate
):
    script, records = tmp_path / "sends.py", tmp_path / "records.jsonl"
    script.write_text(SENDS)
    words = ("--network", f"{rate}mbit", str(script), "1000000")
    done = run_ranks(2, *words, QSGD_RECORDS=str(records), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    seconds, wire_bytes = map(float, re.search(r"RESULT (\S+) (\S+)", done.stdout).groups())
    (network,) = records_of(records, "network")
    assert wire_bytes > 15e6
    assert max(network["sent_bytes"]) == pytest.approx(wire_bytes, rel=0.05)
    # Never sooner than the rate allows; how much later depends on what else this machine does.
    assert seconds > 0.95 * 8 * wire_bytes / (rate * 1e6)
    assert all(r <= 1.02 * rate * 1e6 for r in network["reached_before_bits_s"])
    assert network["reached_after_bits_s"]


STAYS = """
import signal, sys, time
from pathlib import Path
import numpy, qsgd_hpc.arrays as hvd
signal.signal(signal.SIGUSR1, lambda *_: Path(f"{sys.argv[1]}/told-{hvd.rank()}").touch())
hvd.init()
Path(f"{sys.argv[1]}/up-{hvd.rank()}").touch()
for i in range(10**6):
    hvd.allreduce(numpy.ones(4, "f4"), name="x")
    time.sleep(0.05)
"""


@pytest.fixture
def stays(python, tmp_path):
    """Start a run on hosts of their own that does not end by itself; return it once it is up."""

    def start(folder: Path = tmp_path, ranks: int = 2) -> subprocess.Popen[bytes]:
        script = folder / "stays.py"
        script.write_text(STAYS)
        words = ["-np", str(ranks), "--network", "1gbit", str(script), str(folder)]
        process = subprocess.Popen(
            [python, "-m", "qsgd_hpc", "run", *words],
            env={**without_settings(), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        up = [folder / f"up-{rank}" for rank in range(ranks)]
        until(lambda: all(file.exists() for file in up), process=process)
        return process

    return start


def of_run(folder: Path) -> list[psutil.Process]:
    """Return the ranks of a run, its supervisors and its keeper."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def network_spaces(processes: list[psutil.Process]) -> set[str]:
    return {network_of(process.pid) for process in processes}


def network_of(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def all_network_spaces() -> set[str]:
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(network_of(process.pid))
        except OSError:
            continue
    return found


@pytest.mark.gate
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_launcher_is_gone(stays, tmp_path, number):
    machine = sorted(Path("/sys/class/net").iterdir())
    process = stays()
    spaces = network_spaces(of_run(tmp_path)) - {network_of("self")}
    assert len(spaces) == 3  # of two hosts, and of mpiexec between them
    process.send_signal(number)
    process.wait()
    until(lambda: not of_run(tmp_path) and not spaces & all_network_spaces())
    assert sorted(Path("/sys/class/net").iterdir()) == machine
    named = Path("/run/netns")
    assert not named.exists() or not [n for n in named.iterdir() if n.name.startswith("node")]


def test_two_clusters_at_once_do_not_meet(stays, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = []
    for folder in folders:
        folder.mkdir()
        runs.append(stays(folder))
    spaces = [network_spaces(of_run(folder)) for folder in folders]
    assert spaces[0] & spaces[1] <= {network_of("self")}
    runs[0].terminate()
    assert runs[0].wait() == 143
    (folders[1] / "up-0").unlink()
    assert runs[1].poll() is None
    runs[1].terminate()
    assert runs[1].wait() == 143


def test_the_death_of_the_keeper_ends_the_run(stays, tmp_path):
    process = stays()
    (keeper,) = [p for p in of_run(tmp_path) if "cluster.keeper" in " ".join(p.cmdline())]
    keeper.kill()
    assert process.wait() != 0
    until(lambda: not of_run(tmp_path))


def test_signals_that_a_script_awaits_reach_every_host(stays, tmp_path):
    process = stays()
    process.send_signal(signal.SIGUSR1)
    until(lambda: all((tmp_path / f"told-{rank}").exists() for rank in range(2)))
    process.terminate()
    assert process.wait() == 143


def test_a_rank_that_fails_is_named_with_its_host(run_ranks, python):
    code = "import sys; from mpi4py import MPI; sys.exit(7 if MPI.COMM_WORLD.rank == 1 else 0)"
    done = run_ranks(2, "--network", "1gbit", python, "-c", code, QSGD_RUN_GRACE_S="3")
    assert done.returncode == 7
    assert "rank 1 on host node2" in done.stderr


DENIED = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all \
--inh-caps=-all --no-new-privs "$@"'


@pytest.mark.gate
def test_where_namespaces_are_denied_the_remedy_is_named(python):
    """In a user namespace whose own users get no namespaces, and without rights there."""
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", DENIED, "_"]
    words = [python, "-m", "qsgd_hpc"]
    run = [*words, "run", "-np", "2", "--network", "1gbit", "true"]
    done = subprocess.run([*inside, *run], env=without_settings(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "sysctl user.max_user_namespaces=" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    doctor = subprocess.run(
        [*inside, *words, "doctor"], env=without_settings(), capture_output=True, text=True
    )
    assert re.search(r"note +--network +needs namespaces", doctor.stdout)


def test_a_latency_delays_or_the_module_that_would_is_named(run_ranks, tmp_path, python):
    script = tmp_path / "delayed.py"
    script.write_text(
        "import time; from mpi4py import MPI\n"
        "c = MPI.COMM_WORLD; c.barrier(); t = time.monotonic()\n"
        "for _ in range(5): c.barrier()\n"
        "print('RESULT', time.monotonic() - t, flush=True)\n"
    )
    done = run_ranks(2, "--network", "1gbit,latency=20ms", python, str(script))
    if done.returncode == 0:
        seconds = [float(text) for text in re.findall(r"RESULT (\S+)", done.stdout)]
        assert min(seconds) > 5 * 0.02
    else:
        assert done.returncode == 2
        assert "sch_netem" in done.stderr
        assert "leave out latency=" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_without_root_gets_the_same(python, tmp_path, tmp_path_factory):
    """As a plain user, in mounts where root's own Python can be read."""
    script, found = tmp_path / "where.py", tmp_path_factory.mktemp("found")
    script.write_text(WHERE)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    os.chown(found, 1000, 1000)
    for folder in found.parents:
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    words = [python, "-m", "qsgd_hpc", "run", "-np", "2", "--network", "1gbit", str(script)]
    become = (
        "d=$(mktemp -d); mount --bind /root $d; mount -t tmpfs -o mode=755 none /root; "
        "for f in $(ls -A $d); do mkdir /root/$f 2>/dev/null && mount --bind $d/$f /root/$f; done; "
        'exec setpriv --reuid 1000 --regid 1000 --clear-groups "$@"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", become, "_", *words],
        cwd=found,
        env={
            **without_settings(),
            "HOME": str(found),
            "FOUND": str(found),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((found / str(rank)).read_text()) for rank in range(2)]
    assert [r["host"] for r in ranks] == ["node1", "node2"]
    assert [r["uid"] for r in ranks] == [1000, 1000]
    assert "the links reach" in done.stderr
