"""``qsgd-hpc bench allreduce`` on real ranks, and across shaped hosts where those can be made."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import without_settings

ROOT = Path(__file__).parents[2]
SHAPED = ROOT / "benchmarks" / "shaped_network"


def start(words, **environ):
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**without_settings(), **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def bench(python, *words, **environ):
    return start([python, "-m", "qsgd_hpc.cli", "bench", "allreduce", *words], **environ)


def test_two_ranks_beside_their_peers(python, tmp_path):
    path = tmp_path / "allreduce.json"
    done = bench(
        python, "-np", "2", "--sizes", "4K:64K", "--bits", "32,8,4,auto", "--rounds", "3",
        "--peers", "--json", str(path), QSGD_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert (record["schema"], record["ranks"], record["threads"]) == (1, 2, 1)
    assert record["machine"]["ranks"] == 2
    rows = record["rows"]
    assert sorted({row["size_bytes"] for row in rows}) == [4096, 16384, 65536]
    whats = [row["what"] for row in rows if row["size_bytes"] == 4096]
    assert whats[:4] == ["fp32", "engine fp32", "8 bit", "4 bit"]
    assert whats[4].startswith("auto: ")
    assert whats[5:] == ["MPI_Allreduce", "gloo fp32", "gloo fp16"]
    assert all(0 < row["min_s"] <= row["median_s"] <= row["p99_s"] for row in rows)
    for row in rows:
        if row["what"] == "8 bit":
            # (8 + 32/512) / 32 of the bytes, 2 (p-1)/p of them, and a header per message.
            body = row["size_bytes"] * (8 + 32 / 512) / 32
            assert body <= row["wire_bytes"] <= body + 2 * 32 + 64
            assert 1e-5 < row["nmse"] < 1e-3
        if row["what"] in ("fp32", "engine fp32"):
            assert row["nmse"] < 1e-12
    assert all((row["speedup"] is None) == row["is_peer"] for row in rows)
    # One table, from rank 0.
    assert done.stdout.count("MPI_Allreduce") == 3
    assert done.stdout.count("busbw: algbw") == 1


def test_explain_prints_one_plan_per_size_and_measures_no_table(python, tmp_path):
    done = bench(
        python, "-np", "2", "--sizes", "4K,1M", "--bits", "8", "--explain", QSGD_HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    plans = [line for line in done.stdout.splitlines() if "8 bit: " in line]
    assert len(plans) == 2
    assert all(" in " in line and "fp32 " in line for line in plans)
    assert "busbw" not in done.stdout
    (kept,) = (tmp_path / "machines").iterdir()
    assert json.loads(kept.read_text())["key"]["ranks"] == 2


def test_one_launched_rank_is_told_what_to_do(run_ranks, python):
    done = run_ranks(1, python, "-m", "qsgd_hpc.cli", "bench", "allreduce")
    assert done.returncode == 2
    assert "one rank has nothing to reduce with" in done.stderr


def test_a_missing_torch_is_said_and_not_fatal(python, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch, says the test')")
    done = bench(
        python, "-np", "2", "--sizes", "4K", "--bits", "32", "--rounds", "2", "--peers",
        PYTHONPATH=str(tmp_path), QSGD_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gloo is left out: rank 0: No module named torch" in done.stdout
    assert "MPI_Allreduce" in done.stdout


def shaped(*words, **environ):
    return start([sys.executable, str(SHAPED / "run.py"), *words], **environ)


@pytest.fixture
def can_shape():
    """Skip, saying why, where network namespaces cannot be made."""
    spec = importlib.util.spec_from_file_location("network", SHAPED / "network.py")
    network = importlib.util.module_from_spec(spec)
    sys.modules["network"] = network  # where its dataclasses look themselves up
    spec.loader.exec_module(network)
    try:
        network.check_machine()
    except network.NetworkError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "0"], "expected 1 to 16"),
        (["--cpus", "2"], "expected 0.05 to 1"),
        (["--rate", "1"], "expected such as 100mbit"),
        (["--rate", "0gbit"], "expected such as 100mbit"),
    ],
)
def test_a_network_that_cannot_be_is_refused(words, said):
    done = shaped(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_two_shaped_hosts_pass_at_most_their_bandwidth(can_shape, tmp_path):
    path = tmp_path / "shaped.json"
    done = shaped(
        "--hosts", "2", "--rate", "200mbit", "--", sys.executable, "-m", "qsgd_hpc.cli", "bench",
        "allreduce", "--sizes", "4M", "--bits", "32,4", "--rounds", "2", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record["ranks_per_node"] == 1
    fp32, engine, coded = record["rows"]
    assert engine["wire_bytes"] == fp32["wire_bytes"]
    at_least_s = (fp32["wire_bytes"] - 128 * 1024) * 8 / 200e6  # less a burst and a half
    assert fp32["min_s"] > at_least_s
    assert coded["median_s"] < fp32["median_s"] / 3
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "qsgd0" not in listed


# The controls themselves are out of sight of a host.
OWN_GROUP = """
import pathlib, sys
lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
groups = dict(line.split(":", 2)[1:] for line in lines)
own = next((p for names, p in groups.items() if "cpu" in names.split(",")), groups.get(""))
sys.stdout.write(f"{own}\\n")  # one write, or the other rank's may come in between
"""


def test_every_shaped_host_has_a_group_of_its_own_and_one_may_be_alone(can_shape):
    for hosts in (1, 2):
        command = [sys.executable, "-c", OWN_GROUP]
        done = shaped("--hosts", str(hosts), "--cpus", "0.25", "--", *command)
        if "control groups" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(done.stdout.split()) == [f"/qsgd{host}" for host in range(hosts)]


def test_a_share_of_a_core_is_a_quota_and_goes_away(can_shape):
    sys.path.insert(0, str(SHAPED))
    try:
        import cpu_share
    finally:
        sys.path.remove(str(SHAPED))
    name = f"qsgd-test-{os.getpid()}"
    try:
        with cpu_share.shares([name], 0.25) as variables:
            group = Path(variables[cpu_share.VARIABLE]) / name
            found = group / "cpu.max"
            if found.exists():
                quota, period = map(int, found.read_text().split())
            else:
                quota, period = (
                    int((group / f"cpu.cfs_{w}_us").read_text()) for w in ("quota", "period")
                )
            assert quota / period == 0.25
    except cpu_share.CpuShareError as error:
        pytest.skip(str(error))
    assert not group.exists()
