"""What --network means, and how it reaches the launcher; nothing is started here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch import cli
from qsgd_hpc.launch.cluster import Network, links, namespaces, parse
from qsgd_hpc.launch.cluster.keeper import Task, command
from qsgd_hpc.launch.cluster.links import ClusterError, LinkLog, explain_tool
from qsgd_hpc.launch.cluster.network import (
    MOST_HOSTS,
    address,
    host_names,
    hosts_file,
    hosts_needed,
    split,
)
from qsgd_hpc.launch.command import Machine, build_command
from qsgd_hpc.launch.mpi import Family, Launcher
from qsgd_hpc.launch.options import Host, RunOptions, check_options
from qsgd_hpc.launch.output import Decoder, Links
from qsgd_hpc.launch.supervise import NETWORK, encode

GIGABIT = Network(10**9)
HYDRA = Launcher(Family.HYDRA, Path("/opt/mpich/bin/mpiexec"), "Hydra 5.0.2")
OPEN_MPI = Launcher(Family.OPEN_MPI, Path("/opt/openmpi/bin/mpiexec"), "Open MPI 5.0.11")


@pytest.mark.parametrize(
    ("text", "rate", "latency_us", "again"),
    [
        ("1gbit", 10**9, 0, "1gbit"),
        ("100Mbit, latency=50us", 10**8, 50, "100mbit,latency=50us"),
        ("2.5gbit,latency=1.5ms", 2_500_000_000, 1500, "2.5gbit,latency=1.5ms"),
        ("1000 mbit", 10**9, 0, "1gbit"),
        ("64kbit", 64_000, 0, "64kbit"),
    ],
)
def test_a_network_is_read_and_written(text, rate, latency_us, again):
    network = Network.parse(text)
    assert network == Network(rate, latency_us)
    assert network.text == again
    assert Network.parse(network.text) == network


@given(st.integers(1_000, 400 * 10**9), st.sampled_from((0.0, 5.0, 50.0, 2000.0)))
def test_what_is_written_is_read_as_nearly_the_same(rate, latency_us):
    found = Network.parse(Network(rate, latency_us).text)
    assert found.rate_bits_s == pytest.approx(rate, rel=1e-5)
    assert found.latency_us == latency_us


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1gb", ["'gb'", "kbit, mbit, gbit", "such as 1gbit"]),
        ("10", ["rate '10' has no unit", "gbit"]),
        ("0gbit", ["must be above 0"]),
        ("fast", ["'fast' is not a number and a unit"]),
        ("-1gbit", ["'-1gbit'"]),
        ("1gbit,latency=0us", ["latency '0us'", "above 0"]),
        ("1gbit,latency=50", ["latency '50' has no unit", "us, ms, s"]),
        ("1gbit,delay=50us", ["'delay=50us' is unknown", "latency=TIME"]),
        ("1gbit,latency=2s", ["at most 1s"]),
        ("", ["is not a number"]),
    ],
)
def test_bad_networks_are_one_clear_error(text, words):
    with pytest.raises(UsageError) as error:
        Network.parse(text)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_none_stands_for_no_network_and_lists_are_split():
    assert parse(None) is None
    assert parse("None") is None
    assert split("none,1gbit,latency=50us, 10gbit") == ["none", "1gbit,latency=50us", "10gbit"]


def test_labels_are_for_people():
    assert Network.parse("100mbit").label == "100 Mb/s"
    assert Network.parse("10gbit,latency=50us").label == "10 Gb/s, 50 µs"


@pytest.mark.parametrize(("ranks", "each", "hosts"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (1, 8, 1)])
def test_ranks_fill_as_few_hosts_as_hold_them(ranks, each, hosts):
    assert hosts_needed(ranks, each) == hosts
    options = RunOptions(ranks, ("true",), network=GIGABIT, ranks_per_node=each)
    assert options.nodes == tuple(Host(f"node{i}", each) for i in range(1, hosts + 1))


def test_every_host_has_a_name_and_an_address_of_its_own():
    names = host_names(MOST_HOSTS)
    lines = hosts_file(MOST_HOSTS, "laptop").splitlines()
    assert len({address(i) for i in range(1, MOST_HOSTS + 1)}) == len(set(names)) == MOST_HOSTS
    assert [line.split()[1] for line in lines[2:]] == ["laptop", *names]
    assert len({line.split()[0] for line in lines}) == MOST_HOSTS + 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(300, ("true",), network=GIGABIT), ["300 hosts", "253", "--ranks-per-node 2"]),
        (RunOptions(2, ("true",), (Host("nowhere.x", 2),), network=GIGABIT), ["remove -H"]),
        (
            RunOptions(2, ("true",), network=GIGABIT, network_interfaces=("eth0",)),
            ["remove --network-interfaces"],
        ),
    ],
)
def test_what_a_network_excludes_is_one_clear_error(options, words):
    (fault,) = check_options(options)
    assert all(word in fault for word in ("--network 1gbit", *words))


def test_faults_of_run_are_told_at_once():
    done = CliRunner().invoke(cli.run, ["-np", "0", "--network", "1gb", "true"])
    assert isinstance(done.exception, UsageError)
    assert "'gb'" in str(done.exception)


def options_of(launcher, environ=None, **more):
    options = RunOptions(4, ("/bin/true",), network=GIGABIT, **more)
    return build_command(options, launcher, Machine(2), environ or {}, token="t0k3n")


def test_mpich_enters_the_hosts_by_way_of_its_ssh():
    made = options_of(HYDRA)
    task = json.loads(made.argv[3])
    words = made.argv[4:]
    assert (task["network"], task["hosts"], task["token"]) == ("1gbit", 4, "t0k3n")
    assert words[0] == str(HYDRA.path)
    assert words[words.index("-hosts") + 1] == "node1:1,node2:1,node3:1,node4:1"
    assert Path(words[words.index("-launcher-exec") + 1]).stat().st_mode & 0o111 == 0o111
    assert made.env["FI_TCP_IFACE"] == made.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert made.env["OMP_NUM_THREADS"] == "1"  # four ranks share two cores
    assert "QSGD_RANKS_PER_NODE" not in made.env


def test_open_mpi_does_the_same():
    words = options_of(OPEN_MPI, ranks_per_node=2).argv[4:]
    assert words[words.index("--host") + 1] == "node1:2,node2:2"
    assert words[words.index("plm_ssh_agent") + 1].endswith("enter.sh")
    assert words[words.index("prte_if_include") + 1] == "10.77.0.0/24"
    assert "--oversubscribe" in words


def test_the_shell_does_not_know_these_hosts_but_the_user_has_the_last_word():
    shell = {"FI_TCP_IFACE": "ib0", "FI_PROVIDER": "verbs"}
    assert options_of(HYDRA, shell).env["FI_TCP_IFACE"] == "eth0"
    assert options_of(HYDRA, shell, env={"FI_PROVIDER": "sockets"}).env["FI_PROVIDER"] == "sockets"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_inside_a_batch_job_ranks_are_not_kept_to_the_loopback(name):
    options = RunOptions(4, ("/bin/true",))
    made = build_command(options, HYDRA, Machine(2), {name: "1"})
    assert "FI_TCP_IFACE" not in made.env
    assert build_command(options, HYDRA, Machine(2), {}).env["FI_TCP_IFACE"] == "lo"


def test_the_keepers_command_line_takes_no_module_of_the_users_folder(tmp_path):
    words = command(Task("1gbit", 2), ("mpiexec", "-n", "2"))
    assert words[1] == "-c"
    assert "filter(None, sys.path)" in words[2]
    assert words[4:] == ("mpiexec", "-n", "2")


def test_how_a_host_is_entered_is_told_in_a_variable():
    text = namespaces.written(7, {"node1": {"net": 3, "mnt": 4}, "node2": {"net": 5}})
    assert namespaces._read(text, "node2") == {"net": "/proc/7/fd/5"}
    assert namespaces._read(text, "node1") == {"net": "/proc/7/fd/3", "mnt": "/proc/7/fd/4"}
    assert namespaces._read(text, "node") is None


def test_the_keepers_news_is_a_frame_of_its_own():
    frame = encode(b"abcd", NETWORK, 0, b'{"when": "before"}')
    assert list(Decoder("abcd").feed(b"noise\n" + frame))[-1] == Links({"when": "before"})


def test_a_run_is_told_and_recorded_with_the_rates_that_its_links_reached(tmp_path):
    log, records = LinkLog(GIGABIT, 2), tmp_path / "records.jsonl"
    environ = {"QSGD_RECORDS": str(records)}
    before = {"when": "before", "reached_bits_s": [954_000_000, 951_000_000]}
    (opening,) = log.report(before, environ)
    assert "1 Gb/s (emulated)" in opening
    assert "951 Mb/s" in opening
    sent = [1_000_000, 4_000_000]
    after = {"when": "after", "reached_bits_s": [953e6, 700e6], "sent_bytes": sent}
    closing, short = log.report(after, environ)
    assert "4 MB sent by node2" in closing
    assert "700 Mb/s after the run" in short
    body = json.loads(records.read_text())
    assert body["event"] == "network"
    assert body["network"] == "1gbit"
    assert body["reached_before_bits_s"] == [954_000_000, 951_000_000]
    assert body["sent_bytes"] == sent


def test_links_that_cannot_be_probed_again_cost_a_warning_not_the_run():
    after = {"when": "after", "reached_bits_s": [], "why": "gone", "sent_bytes": [1, 2]}
    *_, told = LinkLog(GIGABIT, 2).report(after, {})
    assert "could not be probed again: gone" in told


def test_records_that_cannot_be_written_are_a_warning(tmp_path):
    log = LinkLog(GIGABIT, 2)
    after = {"when": "after", "reached_bits_s": [1e9, 1e9], "sent_bytes": [1, 2]}
    told = log.report(after, {"QSGD_RECORDS": str(tmp_path / "no" / "file")})
    assert "the links are not recorded" in told[-1]


def test_tools_that_are_not_there_are_named_with_their_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(links, "TOOL_FOLDERS", ())
    assert links.tool("ip") is None
    with pytest.raises(ClusterError, match=r"the program ip.*install iproute2"):
        links._batch("ip", ["link"])


def test_a_module_that_the_kernel_lacks_is_named_by_the_step_that_needs_it():
    said = "Error: Specified qdisc kind is unknown."
    assert "sch_tbf" in explain_tool("tc", "qdisc add dev eth0 root tbf rate 1gbit", said)
    assert "leave out latency=" in explain_tool("tc", "qdisc add dev node1 root netem delay", said)
    assert "veth" in explain_tool(
        "ip", "link add eth0 type veth peer", "Error: Unknown device type."
    )
    assert explain_tool("ip", "addr add x", "no such device").endswith("no such device")
