"""Where ranks sit: planned, read out of a log, drawn, and judged."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from qsgd_hpc.jobs.model import Job, JobRequest
from qsgd_hpc.jobs.placement.faults import job_faults, node_faults
from qsgd_hpc.jobs.placement.seats import Domain, Node, Seat, expected, parse_places
from qsgd_hpc.jobs.placement.verify import draw, pinning_preview, pinning_report, pinning_request
from qsgd_hpc.jobs.request.validate import fill
from qsgd_hpc.jobs.sites.profile import Cpu, Gpu, Site
from qsgd_hpc.launch.place import MARK, cpu_list
from tests.jobs.pinning_sites import EIGHT_GCDS, FOUR_GPUS, SITES, TWELVE_TILES

GOLDEN = Path(__file__).parent.parent / "golden" / "pin"
REQUEST = JobRequest(Path("train.py"), nodes=2)
PLAIN = Site("plain", "nothing known", "local", ("mpiexec",))


def planned(site: Site, **given_: Any) -> Node:
    return expected(site, fill(dataclasses.replace(REQUEST, **given_), site))


def record(site: Site, seat: Seat, host: str, **changes: Any) -> dict[str, Any]:
    """Return what a rank on such a node reports."""
    names = sorted(site.gpu.order) if site.gpu else []
    gpus = sorted({name.partition(".")[0] for name in names}, key=int)
    homes = {gpu: n for n, numa in enumerate(site.numa) for gpu in numa.gpus}
    count = (site.hwthreads or 2) // (site.cores or 2)
    total = sum(len(domain.cpus) for domain in planned(site).domains)
    return {
        "rank": seat.rank,
        "local_rank": seat.local_rank,
        "host": host,
        "cpus": cpu_list(seat.cpus),
        "domains": {str(n): numa.cpus for n, numa in enumerate(site.numa)} or {"0": "0-1"},
        "siblings": ",".join(str(n * total // count) for n in range(count)),
        "variables": {site.gpu.variable: seat.gpu, "OMP_NUM_THREADS": "4"} if site.gpu else {},
        "gpus": [{"bus": f"0000:{int(g):02x}:00.0", "uuid": f"GPU-{g}", "numa": homes.get(g)}
                 for g in gpus],
        "nics": {nic: n for n, numa in enumerate(site.numa) for nic in numa.nics},
        **changes,
    }  # fmt: skip


def report_of(site: Site, nodes: int = 2, **changes: Any) -> list[str]:
    """Return the lines of all ranks, each of which sits where the profile plans it."""
    seats = planned(site).seats
    return [
        MARK + json.dumps(record(site, dataclasses.replace(seat, rank=n * len(seats) + at),
                                 f"x{n}", **changes))
        for n in range(nodes)
        for at, seat in enumerate(seats)
    ]  # fmt: skip


def changed(node: Node, change: Callable[[Seat], dict[str, Any]]) -> Node:
    """Return the node with what ``change`` returns for each seat replaced."""
    seats = tuple(dataclasses.replace(seat, **change(seat)) for seat in node.seats)
    return dataclasses.replace(node, seats=seats)


def whats(node: Node, site: Site, plan: Node | None = None) -> list[str]:
    return [fault.what for fault in node_faults(node, site, plan)]


FAULTY: dict[str, Callable[[Seat], dict[str, Any]]] = {
    "far": lambda seat: {"gpu": str(seat.local_rank)},
    "shared": lambda seat: {"gpu": "3"},
    "not_bound": lambda seat: {"cpus": frozenset(range(64))},
    "crowded": lambda seat: {"omp_threads": 16},
    "overlap": lambda seat: {"cpus": seat.cpus | {8}},
}


@pytest.mark.parametrize("name", SITES)
def test_shipped_kinds_of_node_have_no_fault(name: str) -> None:
    node = planned(SITES[name])
    assert whats(node, SITES[name], node) == []


@pytest.mark.parametrize("name", [*SITES, *FAULTY])
def test_picture_is_as_recorded_and_fits_80_columns(name: str) -> None:
    """Set GOLDEN_WRITE=1 to record anew, then look at the difference."""
    site = SITES.get(name, FOUR_GPUS)
    node = planned(site)
    drawn = changed(node, FAULTY[name]) if name in FAULTY else node
    text = draw([drawn], node).plain
    text += "".join(f"{f.what}\n  {f.remedy}\n" for f in node_faults(drawn, site, node))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN_WRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    boxed = [line for line in text.splitlines() if line[:1] in "╭│╰"]
    assert {len(line) for line in boxed} == {80}


@pytest.mark.parametrize("name", SITES)
def test_what_ranks_report_is_what_the_profile_plans(name: str) -> None:
    site = SITES[name]
    nodes = parse_places("\n".join(report_of(site)), site)
    assert [node.host for node in nodes] == ["x0", "x1"]
    for node, first in zip(nodes, (0, len(nodes[0].seats)), strict=True):
        assert [seat.rank - first for seat in node.seats] == [s.local_rank for s in node.seats]
        assert [seat.cpus for seat in node.seats] == [s.cpus for s in planned(site).seats]
        assert [seat.gpu for seat in node.seats] == [s.gpu for s in planned(site).seats]
        assert node.domains == planned(site).domains
        assert whats(node, site, planned(site)) == []
    assert job_faults(nodes, 2 * len(nodes[0].seats), site) == []


@settings(max_examples=40, deadline=None)
@given(
    prefix=st.sampled_from(["", "3: ", "[1,2]<stdout>:", "x1.site 3: ", "warning: no newline"]),
    noise=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=40), max_size=20),
    seed=st.integers(0, 999),
)
def test_reports_are_found_among_any_other_output(prefix: str, noise: list[str], seed: int) -> None:
    lines = [f"{prefix}{line}" for line in report_of(FOUR_GPUS)] + noise
    random.Random(seed).shuffle(lines)
    nodes = parse_places("\n".join(lines), FOUR_GPUS)
    assert sorted(seat.rank for node in nodes for seat in node.seats) == list(range(8))


def test_two_reports_on_one_line_are_two() -> None:
    nodes = parse_places("".join(report_of(FOUR_GPUS)), FOUR_GPUS)
    assert sum(len(node.seats) for node in nodes) == 8


def test_a_report_cut_in_two_is_a_rank_that_did_not_report() -> None:
    lines = report_of(FOUR_GPUS)
    lines[3] = lines[3][:100] + "\nsomething else\n" + lines[3][100:]
    lines[5] = MARK + '{"host": 5}'
    nodes = parse_places("\n".join(lines), FOUR_GPUS)
    (fault,) = job_faults(nodes, 8, FOUR_GPUS)
    assert fault.what == "ranks 3, 5 of 8 did not report"


def told(rank: int, **changes: str) -> tuple[str, ...]:
    """Return what rank of eight, four on a node, is told of torchrun's variables."""
    right = {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(rank % 4), "at": "x0:4711"}
    return tuple((right | changes).values())


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (told, ""),
        (lambda rank: (), ""),
        (lambda rank: told(rank, WORLD_SIZE="4"), "ranks 0-7: RANK, WORLD_SIZE and LOCAL_RANK"),
        (lambda rank: told(rank, LOCAL_RANK="0"), "ranks 1-3, 5-7: RANK, WORLD_SIZE and LOCAL"),
        (lambda rank: told(rank, at=f"x{rank // 4}:1"), "would meet at x0:1 and x1:1"),
        (lambda rank: told(rank, at="x0:?"), "would meet at x0:?"),
        (lambda rank: told(rank) if rank else (), "rank 0 was not told where"),
    ],
    ids=["right", "not told", "another size", "no local rank", "two places", "no port", "one"],
)
def test_ranks_of_torch_distributed_that_would_not_meet_are_faults(
    tell: Callable[[int], tuple[str, ...]], said: str
) -> None:
    nodes = [
        dataclasses.replace(
            planned(FOUR_GPUS),
            host=f"x{n}",
            seats=tuple(
                dataclasses.replace(seat, rank=4 * n + at, torchrun=tell(4 * n + at))
                for at, seat in enumerate(planned(FOUR_GPUS).seats)
            ),
        )
        for n in range(2)
    ]
    faults = [fault.what for fault in job_faults(nodes, 8, FOUR_GPUS)]
    assert len(faults) == bool(said)
    assert said in "".join(faults)


def test_what_torchrun_tells_is_read_from_the_reports() -> None:
    variables = {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "x0", "MASTER_PORT": "47"
    }  # fmt: skip
    nodes = parse_places("\n".join(report_of(FOUR_GPUS, variables=variables)), FOUR_GPUS)
    assert nodes[1].seats[1].torchrun == ("5", "8", "1", "x0:47")
    assert parse_places("\n".join(report_of(FOUR_GPUS)), FOUR_GPUS)[0].seats[0].torchrun == ()


def test_ranks_of_a_launcher_that_numbers_none_are_noticed() -> None:
    lines = report_of(FOUR_GPUS, rank=None, local_rank=None)
    (fault,) = job_faults(parse_places("\n".join(lines), FOUR_GPUS), 8, FOUR_GPUS)
    assert "local_rank_variables" in fault.remedy
    assert fault.what.startswith("8 processes reported, but rank 0 more than once")


@pytest.mark.parametrize(
    ("value", "local_rank", "gpu"),
    [
        ("3,2,1,0", 1, "2"),
        ("3,2,1,0", 5, "2"),
        ("2", 1, "2"),
        ("GPU-3", 0, "3"),
        ("", 0, None),
        ("-1", 0, None),
        (None, 1, "1"),
        ("9", 0, "9"),
    ],
)
def test_the_gpu_is_the_one_that_local_rank_selects(
    value: str | None, local_rank: int, gpu: str | None
) -> None:
    seat = dataclasses.replace(planned(FOUR_GPUS).seats[0], local_rank=local_rank)
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    line = MARK + json.dumps(record(FOUR_GPUS, seat, "x", variables=variables))
    (node,) = parse_places(line, FOUR_GPUS)
    assert node.seats[0].gpu == gpu


def test_ranks_that_each_see_one_renumbered_gpu_sit_on_different_ones() -> None:
    lines = []
    for seat in planned(FOUR_GPUS).seats:
        full = record(FOUR_GPUS, seat, "x")
        own = [full["gpus"][int(seat.gpu or 0)]]
        lines.append(
            MARK + json.dumps({**full, "gpus": own, "variables": {"CUDA_VISIBLE_DEVICES": "0"}})
        )
    (node,) = parse_places("\n".join(lines), FOUR_GPUS)
    assert [seat.gpu for seat in node.seats] == ["3", "2", "1", "0"]
    assert whats(node, FOUR_GPUS, planned(FOUR_GPUS)) == []


def test_thousands_of_nodes_are_drawn_as_the_few_kinds_that_they_are() -> None:
    node = planned(FOUR_GPUS)
    nodes = [dataclasses.replace(node, host=f"x{n}") for n in range(3000)]
    nodes[77] = changed(nodes[77], FAULTY["far"])
    text = draw(nodes, node).plain
    assert text.startswith("2999 equal nodes: x0, x1, x2, x3 and 2995 more  4 ranks\n")
    assert "\nx77  4 ranks\n" in text
    assert text.count("\n") < 40


def test_any_number_of_cores_and_cards_fits_80_columns() -> None:
    odd = frozenset(range(1, 300, 2))
    cards = tuple(f"a_long_name_{n}" for n in range(9))
    seats = (Seat(0, 0, odd, "0.1", "card"), Seat(1, 1, frozenset({0, 3}), "1.1", "card"))
    node = Node("x", seats, (Domain(0, odd, ("0",), cards), Domain(1, frozenset({0}), ("1",))))
    lines = draw([node]).plain.splitlines()
    assert {len(line) for line in lines[1:]} == {80}
    assert "■ is 3 cores" in lines[2]


def test_ten_gpus_and_more_are_listed_by_number() -> None:
    gpu = Gpu("ZE_AFFINITY_MASK", tuple(str(n) for n in range(12)))
    site = dataclasses.replace(PLAIN, cores=104, gpus=12, gpu=gpu)
    assert "GPUs 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11" in draw([planned(site)]).plain


def test_a_rank_of_two_domains_is_told_of_once() -> None:
    text = draw([changed(planned(FOUR_GPUS), FAULTY["overlap"])]).plain
    assert text.count("GPU 3 ") == 2  # beside the box's name, and beside the rank
    assert "│ rank 0   ■·······  here too" in text


def test_too_few_gpus_are_remedied_by_fewer_ranks() -> None:
    node = planned(FOUR_GPUS, ranks_per_node=8)
    (shared, *_) = node_faults(node, FOUR_GPUS)
    assert shared.remedy == "Use --ranks-per-node 4 or fewer."


def test_far_gpus_are_remedied_by_the_right_order() -> None:
    (fault,) = node_faults(changed(planned(FOUR_GPUS), FAULTY["far"]), FOUR_GPUS)
    assert "gpu.order to 3, 2, 1, 0:" in fault.remedy


def test_a_rank_without_a_gpu_is_a_fault_where_there_should_be_one() -> None:
    node = changed(planned(FOUR_GPUS), lambda seat: {"gpu": None})
    assert whats(node, FOUR_GPUS, planned(FOUR_GPUS)) == ["ranks 0-3 see no GPU"]


def test_unbound_ranks_are_no_fault_where_nothing_binds_them() -> None:
    node = changed(planned(PLAIN, ranks_per_node=2), lambda seat: {"cpus": frozenset({0, 1})})
    (fault,) = node_faults(node, PLAIN, planned(PLAIN, ranks_per_node=2))
    assert not fault.severe


def job_with(tmp_path: Path, site: Site, log: str | None, nodes: int = 2) -> Job:
    request = fill(dataclasses.replace(REQUEST, nodes=nodes), site)
    if log is not None:
        (tmp_path / "output.log").write_text(log, encoding="utf-8")
    return Job("pinning-1", site.name, site.scheduler, request, tmp_path, 0.0)


def shown(
    function: Callable[..., bool], *arguments: Any, encoding: str = "utf-8"
) -> tuple[bool, str]:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=80)
    good = function(*arguments, console)
    console.file.flush()
    return good, raw.getvalue().decode(encoding)


def test_report_of_a_good_job_says_so(tmp_path: Path) -> None:
    job = job_with(tmp_path, FOUR_GPUS, "\n".join(report_of(FOUR_GPUS)))
    good, text = shown(pinning_report, job, FOUR_GPUS)
    assert good
    assert "2 equal nodes: x0, x1  4 ranks, 4 threads each\n" in text
    assert "✓ Each of 8 ranks has cores and a GPU of its own, one beside the other." in text


def test_report_of_a_bad_job_names_faults_nodes_and_remedies(tmp_path: Path) -> None:
    lines = report_of(FOUR_GPUS, variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    good, text = shown(pinning_report, job_with(tmp_path, FOUR_GPUS, "\n".join(lines)), FOUR_GPUS)
    assert not good
    assert "✗ ranks 0-3 far from their GPUs" in text
    assert "on all 2 nodes." in text
    assert "≠ the profile plans GPU 3" in text


def test_report_of_a_job_without_reports_shows_the_end_of_its_log(tmp_path: Path) -> None:
    job = job_with(tmp_path, FOUR_GPUS, "pin.sh: no variable\n")
    good, text = shown(pinning_report, job, FOUR_GPUS)
    assert not good
    assert "no rank reported its pinning" in text
    assert "  pin.sh: no variable" in text
    assert not shown(pinning_report, job_with(tmp_path / "none", FOUR_GPUS, None), FOUR_GPUS)[0]


@pytest.mark.parametrize("site", [FOUR_GPUS, EIGHT_GCDS, TWELVE_TILES])
def test_preview_shows_the_plan(site: Site) -> None:
    good, text = shown(pinning_preview, fill(REQUEST, site), site)
    assert good
    assert text.startswith(f"{site.name}: planned pinning for each of the 2 nodes\n╭─ NUMA 0")


def test_a_terminal_without_box_letters_gets_a_picture_all_the_same() -> None:
    _, text = shown(pinning_preview, fill(REQUEST, FOUR_GPUS), FOUR_GPUS, encoding="ascii")
    assert "| rank 0   ########  GPU 3" in text


def test_request_keeps_the_shape_and_drops_what_belongs_to_training() -> None:
    request = dataclasses.replace(
        REQUEST, array={"lr": ("1", "2")}, chain=3, requeue=True, key="k", after=("a",),
        gpu_view="one", env={"A": "b"}, walltime_min=600.0, script_args=("--epochs", "3"),
    )  # fmt: skip
    made = pinning_request(request, TWELVE_TILES)
    assert made.script.name == "place.py"
    assert made.script.is_file()
    assert (made.nodes, made.gpu_view, made.env) == (2, "one", {"A": "b"})
    assert (made.tasks, made.chain, made.requeue, made.after, made.key) == ((), 1, False, (), None)
    assert made.walltime_min == 5.0
    assert made.script_args == (
        "--local-rank", "MY_LOCAL_RANK", "--show", "ZE_AFFINITY_MASK", "--show",
        "FI_CXI_DEVICE_NAME",
    )  # fmt: skip


def test_request_names_srun_so_that_its_variables_come_first() -> None:
    assert "slurm" in pinning_request(REQUEST, EIGHT_GCDS).script_args


def test_the_users_own_gpus_are_planned_and_judged() -> None:
    node = planned(FOUR_GPUS, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert {seat.gpu for seat in node.seats} == {"0"}
    assert whats(node, FOUR_GPUS)[0] == "ranks 0-3 share GPU 0"


def test_the_wrappers_lists_are_the_plan() -> None:
    site = dataclasses.replace(FOUR_GPUS, cpu=Cpu(("0-3", "8-11"), "wrapper"))
    assert [cpu_list(seat.cpus) for seat in planned(site).seats] == ["0-3", "0-3", "8-11", "8-11"]
