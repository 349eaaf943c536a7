"""``qsgd-hpc bench allreduce`` on real ranks, and across shaped hosts where those can be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import without_settings

ROOT = Path(__file__).parents[2]
CPU_SHARE = ROOT / "benchmarks" / "cpu_share.py"


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
    return start([python, "-m", "qsgd_hpc", "bench", "allreduce", *words], **environ)


def test_two_ranks_beside_their_peers(python, tmp_path):
    path = tmp_path / "allreduce.json"
    done = bench(
        python, "-np", "2", "--sizes", "4K:64K", "--bits", "32,8,4,2,auto", "--rounds", "3",
        "--scheme", "qsgd,eden", "--peers", "--json", str(path), QSGD_HOME=str(tmp_path),
        QSGD_PLANNER="on",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "planner" not in done.stderr
    record = json.loads(path.read_text())
    assert (record["schema"], record["ranks"], record["threads"]) == (1, 2, 1)
    assert record["machine"]["ranks"] == 2
    rows = record["rows"]
    assert sorted({row["size_bytes"] for row in rows}) == [4096, 16384, 65536]
    whats = [row["what"] for row in rows if row["size_bytes"] == 4096]
    assert whats[:4] == ["fp32", "engine fp32", "8 bit", "eden 8 bit"]
    assert whats[4:8] == ["4 bit", "eden 4 bit", "2 bit feedback", "eden 2 bit"]
    assert whats[8].startswith("auto: ")
    assert whats[9:] == ["MPI_Allreduce", "gloo fp32", "gloo fp16"]
    assert all(0 < row["min_s"] <= row["median_s"] <= row["p99_s"] for row in rows)
    for row in rows:
        if row["what"] in ("8 bit", "eden 8 bit"):
            # (8 + 32/512) / 32 of the bytes, 2 (p-1)/p of them, and a header per message.
            body = row["size_bytes"] * (8 + 32 / 512) / 32
            assert body <= row["wire_bytes"] <= body + 2 * 32 + 64
            assert 1e-5 < row["nmse"] < 1e-3
        if row["what"] in ("fp32", "engine fp32"):
            assert row["nmse"] < 1e-12
        if row["what"] == "2 bit feedback":
            assert row["nmse"] > 1e-3
            assert row["wire_bytes"] > 0
    assert all((row["speedup"] is None) == row["is_peer"] for row in rows)
    # One table, from rank 0.
    assert done.stdout.count("MPI_Allreduce") == 3
    assert done.stdout.count("busbw: algbw") == 1


def test_explain_prints_one_plan_per_size_and_measures_no_table(python, tmp_path):
    done = bench(
        python, "-np", "2", "--sizes", "4K,1M", "--bits", "8", "--scheme", "qsgd,eden", "--explain",
        "--json", str(tmp_path / "plans.json"), QSGD_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plans = [line for line in done.stdout.splitlines() if "8 bit: " in line]
    assert len(plans) == 2
    assert done.stdout.count("eden(bits=8") == 2
    assert all(" in " in line and "fp32 " in line for line in plans)
    assert "busbw" not in done.stdout
    written = json.loads((tmp_path / "plans.json").read_text())["plans"]
    assert [plan["size_bytes"] for plan in written] == [4096, 4096, 1 << 20, 1 << 20]
    assert all(plan["reason"] in done.stdout for plan in written)
    (kept,) = (tmp_path / "machines").iterdir()
    assert json.loads(kept.read_text())["key"]["ranks"] == 2


def test_one_launched_rank_is_told_what_to_do(run_ranks, python):
    done = run_ranks(1, python, "-m", "qsgd_hpc", "bench", "allreduce")
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


@pytest.mark.usefixtures("hosts_of_their_own")
def test_hosts_of_a_network_are_held_to_its_rate(python, tmp_path):
    path = tmp_path / "hosts.json"
    done = bench(
        python, "-np", "2", "--network", "200mbit", "--sizes", "4M", "--bits", "32,4",
        "--rounds", "2", "--json", str(path), QSGD_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert (record["ranks_per_node"], record["bandwidth_gbps"]) == (1, 0.2)
    fp32, engine, coded = record["rows"]
    assert engine["wire_bytes"] == fp32["wire_bytes"]
    at_least_s = (fp32["wire_bytes"] - 128 * 1024) * 8 / 200e6  # less a burst and a half
    assert fp32["min_s"] > at_least_s
    assert coded["median_s"] < fp32["median_s"] / 3


@pytest.mark.gate
def test_ranks_that_run_already_take_no_network(run_ranks, python):
    done = run_ranks(
        2, python, "-m", "qsgd_hpc", "bench", "allreduce", "--network", "1gbit", "--rounds", "1"
    )
    assert done.returncode == 2
    assert "--network 1gbit: these ranks are already started" in done.stderr


def share(*words):
    return start([sys.executable, str(CPU_SHARE), *words])


@pytest.mark.gate
@pytest.mark.parametrize(
    "words", [["2", "true"], ["half", "true"], ["0.5"], ["0.5", "--"], ["0", "true"], []]
)
def test_a_share_that_cannot_be_is_refused(words):
    done = share(*words)
    assert done.returncode == 2
    assert "expected a share from 0.05 to 1 and a command" in done.stderr


# Its own group's quota, as the kernel has it; one write, or another rank's may come in between.
OWN_SHARE = """
import json, pathlib, sys
lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
groups = dict(line.split(":", 2)[1:] for line in lines)
name = next((p for names, p in groups.items() if "cpu" in names.split(",")), groups.get(""))
folder = pathlib.Path("/sys/fs/cgroup")
group = (folder / "cpu" if (folder / "cpu").is_dir() else folder) / name.strip("/")
try:
    quota, period = (group / "cpu.max").read_text().split()
except OSError:
    quota, period = ((group / f"cpu.cfs_{w}_us").read_text() for w in ("quota", "period"))
sys.stdout.write(json.dumps([str(group), int(quota) / int(period)]) + "\\n")
sys.exit(int(sys.argv[1]))
"""


def test_every_rank_has_a_share_of_its_own_which_goes_away(python):
    own_share = [python, str(CPU_SHARE), "0.25", "--", python, "-c", OWN_SHARE]
    alone = start([*own_share, "3"])
    if "control groups" in alone.stderr:
        pytest.skip(alone.stderr)
    assert alone.returncode == 3, alone.stderr
    ranks = start([python, "-m", "qsgd_hpc", "run", "-np", "2", *own_share, "0"])
    assert ranks.returncode == 0, ranks.stderr
    found = [json.loads(line) for line in (alone.stdout + ranks.stdout).splitlines()]
    assert [quota for _, quota in found] == [0.25] * 3
    groups = {group for group, _ in found}
    assert len(groups) == 3
    assert not any(Path(group).exists() for group in groups)


def test_explain_with_sizes_tries_every_choice_beside_the_plan(python, tmp_path):
    path = tmp_path / "choices.json"
    done = bench(
        python, "-np", "2", "--explain", "--trial", "--sizes", "4K,64K", "--bits", "32,8,4",
        "--rounds", "3", "--json", str(path), QSGD_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    found = record["choices"]
    for size_bytes in (4096, 65536):
        of_size = [row for row in found if row["size_bytes"] == size_bytes]
        assert {row["code"] for row in of_size} == {"fp32", "8 bit", "4 bit"}
        assert {"sra", "allgather"} <= {r["algorithm"] for r in of_size if r["code"] == "4 bit"}
        (planned,) = [row for row in of_size if row["planned"]]
        assert planned["measured_s"] > 0
        assert all(row["predicted_s"] > 0 for row in of_size)
        assert planned["predicted_s"] < 3 * min(row["predicted_s"] for row in of_size)
    assert done.stdout.count("planned: ") == 3  # one of each size, and the legend
    seen = {(o["algorithm"], o["bits"]) for o in record["machine"]["observed"]}
    assert {("sra", 8), ("sra", 4), ("allgather", 2)} <= seen
