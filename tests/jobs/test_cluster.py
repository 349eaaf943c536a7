"""Jobs of the local site on hosts of their own: option, profile, script and faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import JobRequest, sites
from qsgd_hpc.jobs.registry import request_from_json, request_to_json
from qsgd_hpc.jobs.request.validate import fill, network_faults
from qsgd_hpc.jobs.script import Place, Step, Tools, render_script, step_scripts
from qsgd_hpc.scaling.predict.fabric import fabric_of_site

TOOLS = Tools("python3", ("qsgd-hpc",))


def script(network: str | None, site_name: str = "local") -> str:
    site = sites.load(site_name)
    request = fill(JobRequest(Path("train.py"), nodes=2, network=network), site)
    return render_script(request, site, TOOLS, Place(Path("/jobs/1")))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("network", "launch"),
    [
        (None, "qsgd-hpc run -np 2 --ranks-per-node 1 --prefix-output --"),
        ("none", "qsgd-hpc run -np 2 --ranks-per-node 1 --prefix-output --"),
        (
            "1gbit,latency=50us",
            "qsgd-hpc run -np 2 --ranks-per-node 1 --network 1gbit,latency=50us --prefix-output --",
        ),
    ],
)
def test_a_local_job_starts_its_ranks_on_the_network(network, launch):
    assert launch in script(network)


def test_a_profile_may_say_which_network_its_nodes_have(own):
    (own / "local.yaml").write_text("network: 100 mbit\n")
    assert "--network 100mbit --prefix" in script(None)
    assert "--network 1gbit --prefix" in script("1gbit")
    assert "--network" not in script("none")
    assert sites.load("local").network.nic_gbps == 0.1  # and predictions compute with it
    assert fabric_of_site(sites.load("local")) is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("network: 1gb\n", ["local.yaml", "line 1", "'gb'", "gbit"]),
        ("network: 7\n", ["'network' must be", "1gbit"]),
    ],
)
def test_a_network_that_is_none_is_a_fault_of_the_profile(own, text, words):
    (own / "local.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        sites.load("local")
    assert all(word in str(error.value).replace("yaml:1", "yaml line 1") for word in words)


def test_a_cluster_has_its_own_network(own):
    (own / "mine.yaml").write_text("extends: polaris\nnetwork: 1gbit\n")
    with pytest.raises(UsageError, match="for the local scheduler"):
        sites.load("mine")
    (own / "mine.yaml").unlink()
    request = JobRequest(Path("train.py"), nodes=2, network="1gbit")
    (fault,) = network_faults(request, sites.load("polaris"))
    assert "polaris has its own network" in fault
    assert "--site local" in fault


def test_a_launcher_without_a_place_for_it_is_a_fault_not_a_plain_run(own):
    (own / "mine.yaml").write_text(
        'extends: local\nlauncher: {argv: ["{qsgd_hpc}", run, -np, "{ranks}", --]}\n'
    )
    request = JobRequest(Path("train.py"), nodes=2, network="1gbit")
    (fault,) = network_faults(request, sites.load("mine"))
    assert '"{network}"' in fault
    assert "'mine'" in fault


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("network", "word"), [("0gbit", "above 0"), ("1gbit", "253")])
def test_bad_networks_and_too_many_nodes_are_one_fault(network, word):
    request = JobRequest(Path("train.py"), nodes=254, network=network)
    (fault,) = network_faults(request, sites.load("local"))
    assert word in fault


@pytest.mark.usefixtures("own")
def test_a_step_keeps_its_own_network(tmp_path):
    train = tmp_path / "train.py"
    train.touch()
    job = JobRequest(train, nodes=2, site="local", alone=True, workdir=tmp_path)
    steps = [
        Step(JobRequest(train, nodes=2, network=n), tmp_path / "step", tmp_path / "hosts")
        for n in ("1gbit", None)
    ]
    (first, second), _ = step_scripts(job, steps)
    assert "--network 1gbit" in first
    assert "--network" not in second


def test_a_request_survives_its_record():
    request = JobRequest(Path("train.py"), network="1gbit")
    assert request_from_json(request_to_json(request)) == request
    old = {k: v for k, v in request_to_json(request).items() if k != "network"}
    assert request_from_json(old).network is None
