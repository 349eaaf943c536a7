"""``qsgd-hpc predict``: predicts a measured training on more nodes of a known machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from click.core import ParameterSource

from qsgd_hpc.cli import Finite
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.sites.files import dotted, merged, unconfirmed
from qsgd_hpc.jobs.words import listing
from qsgd_hpc.scaling.predict.fabric import Fabric, fabric_of_site, flat_fabric
from qsgd_hpc.scaling.predict.inputs import Measured, measured, training_of
from qsgd_hpc.scaling.predict.model import ClosedForm, Network, Setting, predict_one
from qsgd_hpc.scaling.predict.model import predict as predict_rows
from qsgd_hpc.scaling.predict.output import (
    LABEL,
    Result,
    as_json,
    as_lines,
    assumptions,
    write_folder,
)
from qsgd_hpc.scaling.predict.schedules import ALGORITHMS
from qsgd_hpc.scaling.predict.simgrid import ROUTINGS, SimGrid, simulator
from qsgd_hpc.scaling.store import is_number
from qsgd_hpc.scaling.units import count

__all__ = ["predict"]

BITS = (2, 4, 8, 32)
_RATE = Finite(0, min_open=True)


@click.command(context_settings={"show_default": True})
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of a study; its smallest size gives the time of computation.",
)
@click.option("--case", help="Case of the study, if it has several.")
@click.option("--site", help="Machine to predict for; its profile describes the network.")
@click.option("--link-gbps", type=_RATE, help="Instead of --site: one link per node, Gb/s.")
@click.option(
    "--link-latency-us", "latency_us", type=Finite(0), help="Latency of that link.  [default: 50]"
)
@click.option("--memory-gbs", type=_RATE, help="Memory bandwidth of a node, GB/s.  [default: 100]")
@click.option("--nodes", default="1..128", help="A list (2,3,4), or a range (8..496) in doublings.")
@click.option(
    "--bits",
    default="32,8,4",
    help="Bits per gradient element: 8, 4, 2; 32 is plain float32.",
)
@click.option("--ranks-per-node", type=click.IntRange(1), help="Default: the site's, or 1.")
@click.option("--mode", type=click.Choice(["weak", "strong"]), help="Default: the study's.")
@click.option(
    "--gpu-speedup",
    type=_RATE,
    default=1.0,
    help="Assumed speed of computation there, relative to the measurement.",
)
@click.option(
    "--algorithm",
    type=click.Choice(["auto", *ALGORITHMS]),
    default="auto",
    help="Allreduce algorithm; auto where it does not fit the bits.",
)
@click.option("--routing", type=click.Choice(ROUTINGS), default=ROUTINGS[0], help="In SimGrid.")
@click.option("--simgrid/--no-simgrid", default=True, help="Simulate the topology as well.")
@click.option("--validate", is_flag=True, help="Predict the study's own larger sizes instead.")
@click.option("--json", "as_data", is_flag=True, help="Print JSON.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for md, png, json.")
def predict(**options: Any) -> None:
    """Predict step time, throughput and efficiency on more nodes than were measured.

    "step ms" is the sum of "compute ms", "wait ms" for the slowest rank, "exposed ms" and, where
    there are any, copies from and to GPUs and waiting for data (--json). "comm ms" is all work of
    the engine in a step, "agree ms" the part of it in which ranks agree on what to reduce,
    "exposed ms" the part that does not overlap with the backward pass.

    \b
      qsgd-hpc predict --from scaling-results/train --site polaris --nodes 8..496
      qsgd-hpc predict --from scaling-results/train --link-gbps 1 --validate
    """
    points, study_mode = measured(options["source"], options["case"])
    source = f"measured in {options['source'].resolve().name}"
    fabric, doubts, per_node = _machine(options)
    setting = Setting(
        ranks_per_node=per_node,
        mode=options["mode"] or study_mode,
        speedup=options["gpu_speedup"],
        algorithm=options["algorithm"],
    )
    networks, notes = _networks(fabric, options["simgrid"], options["routing"])
    if options["validate"] and options["output"]:
        raise UsageError("--validate only prints: drop -o, or redirect the output of --json.")
    if options["validate"]:
        _refuse_choices()
        both = _compare(points, study_mode, fabric, networks, source, setting)
        _show_comparison(both, fabric, notes, options["as_data"])
        return
    training = training_of(points, study_mode, source)
    if training.buckets and options["algorithm"] != "auto":
        raise UsageError("--algorithm is the engine's; the study's gradients were DDP's: drop it.")
    nodes, bits = parse_nodes(options["nodes"]), _parse_bits(options["bits"])
    batch = next((p.get("global_batch_size") for p in points if p["ranks"] == training.ranks), None)
    if setting.mode == "strong" and batch and max(nodes) * per_node > batch:
        notes.append(f"More than {batch} ranks cannot share the global batch of {batch} samples.")
    most = _largest_job(options["site"])
    if most and max(nodes) > most:
        notes.append(f"{options['site']} accepts no jobs of more than {most} nodes.")
    rows, *simulated = (
        tuple(predict_rows(training, fabric, setting, nodes, bits, network)) for network in networks
    )
    where = f"{fabric.name}, {count(per_node, 'rank')} a node"
    result = Result(
        f"{training.name} on {where}, {setting.mode} scaling",
        training.unit,
        rows,
        *simulated,
        assumptions=tuple(assumptions(training, fabric, setting, bits, doubts, options["routing"])),
        notes=tuple(notes),
    )
    _show(result, options["as_data"], options["output"])


def _refuse_choices() -> None:
    """Raise if the command line chooses what a validation takes from the study."""
    source_of = click.get_current_context().get_parameter_source
    names = ("nodes", "bits", "mode", "ranks_per_node")
    given = [n for n in names if source_of(n) is ParameterSource.COMMANDLINE]
    if given:
        flags = listing([f"--{name.replace('_', '-')}" for name in given], "and")
        raise UsageError(f"--validate predicts what the study measured: drop {flags}.")


def _machine(options: dict[str, Any]) -> tuple[Fabric, list[str], int]:
    """Return the machine, the unconfirmed facts of its profile, and the ranks per node."""
    if (options["site"] is None) == (options["link_gbps"] is None):
        raise UsageError("Give --site NAME, or --link-gbps G for hosts on one switch.")
    given = {n: v for n in ("latency_us", "memory_gbs") if (v := options[n]) is not None}
    if options["site"] is None:
        name = f"hosts with {options['link_gbps']:g} Gb/s each"
        return flat_fabric(name, options["link_gbps"], **given), [], options["ranks_per_node"] or 1
    if given:
        raise UsageError(
            "--link-latency-us and --memory-gbs are of hosts with --link-gbps; those of --site are "
            "in its profile (jobs/README.md)."
        )
    site = sites.load(options["site"])
    doubts = [dotted(path) for path in unconfirmed(merged(site.name)) if path[0] == "network"]
    per_node = options["ranks_per_node"] or site.ranks_per_node or site.gpus or 1
    return fabric_of_site(site), doubts, per_node


def _largest_job(site: str | None) -> int | None:
    """Return the most nodes that a queue of the site accepts; None if its profile names none."""
    queues = sites.load(site).queues.values() if site else ()
    return max((queue.nodes[1] for queue in queues if queue.unit == "node"), default=None)


def _networks(fabric: Fabric, simgrid: bool, routing: str) -> tuple[list[Network], list[str]]:
    networks: list[Network] = [ClosedForm()]
    if not simgrid:
        return networks, ["The topology is not simulated (--no-simgrid): closed form only."]
    try:
        simulator()
    except UsageError as error:
        return networks, [f"Closed form only, without the topology. {error}"]
    return [*networks, SimGrid(fabric, routing=routing)], []


def parse_nodes(text: str) -> list[int]:
    """Return the counts in "8..496" (doubling, with both ends) or "2,3,4".

    Raises:
        UsageError: the text has another form.
    """
    try:
        if ".." in text:
            least, most = (int(word) for word in text.split(".."))
            if not 0 < least <= most:
                raise ValueError
            counts = []
            while least < most:
                counts.append(least)
                least *= 2
            counts.append(most)
        else:
            counts = [int(word) for word in text.split(",")]
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        raise UsageError(f"--nodes {text!r}: expected 8..496, or counts such as 2,4,8.") from None
    return counts


def _parse_bits(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip() in map(str, BITS) for word in words):
        raise UsageError(f"--bits {text!r}: expected some of 32,8,4,2.")
    return [int(word) for word in words]


def _show(result: Result, as_data: bool, folder: Path | None) -> None:
    paths = write_folder(result, folder) if folder else []
    if as_data:
        click.echo(json.dumps(as_json(result), indent=1))
        return
    for line in as_lines(result):
        click.echo(line)
    for head, sentences in result.remarks():
        click.echo(f"\n{head}")
        for sentence in sentences:
            click.echo(f"  - {sentence}")
    for path in paths:
        click.echo(f"written: {path}")


def _show_comparison(
    rows: list[_Comparison], fabric: Fabric, notes: list[str], as_data: bool
) -> None:
    if as_data:
        body = [{**row.__dict__, "error": row.error} for row in rows]
        click.echo(json.dumps({"label": LABEL, "fabric": fabric.name, "rows": body}, indent=1))
        return
    click.echo(f"{LABEL}: larger sizes from the smallest one, {fabric.name}")
    click.echo(
        f"{'nodes':>5} {'ranks':>5} {'bits':>4}  {'by':<12} {'measured ms':>12} {'repeats':>8} "
        f"{'predicted ms':>12} {'error':>7}"
    )
    for row in rows:
        spread = "one run" if row.spread is None else f"±{row.spread:.1%}"
        click.echo(
            f"{row.nodes:>5} {row.ranks:>5} {row.bits:>4}  {row.by:<12} "
            f"{row.measured_s * 1e3:>12.4g} {spread:>8} {row.predicted_s * 1e3:>12.4g} "
            f"{row.error:>+7.1%}"
        )
    for note in notes:
        click.echo(note)


@dataclass(frozen=True)
class _Comparison:
    """One size: step times in seconds, and the relative error of the prediction.

    Attributes:
        spread: largest relative distance of a repeat from the median; None for a single run. A
            smaller error may be due to the measurement.
    """

    nodes: int
    ranks: int
    bits: int
    by: str
    measured_s: float
    predicted_s: float
    spread: float | None = None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def _compare(
    points: Sequence[Measured],
    mode: str,
    fabric: Fabric,
    networks: Sequence[Network],
    source: str,
    setting: Setting,
) -> list[_Comparison]:
    """Return the measurement and the prediction of every size above the smallest one.

    The step time is the mean over timed steps of computing, exposed communication and waiting for
    data together. Coding costs are taken from the study itself.

    Raises:
        UsageError: there is only one size, or values are missing.
    """
    training = training_of(points, mode, source)
    larger = sorted(
        {(int(p["nodes"]), int(p["ranks"])) for p in points if p["ranks"] > training.ranks}
    )
    if not larger:
        raise UsageError(
            f"{source} has one size; a validation needs a larger one. Measure --nodes 1,2,4."
        )
    found = []
    for nodes, ranks in larger:
        chosen = [p for p in points if p["nodes"] == nodes and p["ranks"] == ranks]
        for bits in sorted({int(p["bits"]) for p in chosen}, reverse=True):
            times = [s for p in chosen if p["bits"] == bits if (s := _step_s(p)) is not None]
            if not times:
                continue
            here = replace(setting, ranks_per_node=ranks // nodes, mode=mode)
            middle = median(times)
            spread = max(abs(s / middle - 1) for s in times) if len(times) > 1 else None
            for network in networks:
                row = predict_one(training, fabric, here, nodes, bits, network)
                found.append(
                    _Comparison(nodes, ranks, bits, network.name, middle, row.step_s, spread)
                )
    return found


def _step_s(point: Measured) -> float | None:
    # The engine's mean step includes the tests between epochs, which are not predicted.
    for name in ("step_s",) if point.get("source") == "engine" else ("step_mean_s", "step_s"):
        if is_number(point.get(name)):
            return float(point[name])
    throughput, batch = point.get("throughput"), point.get("global_batch_size")
    if is_number(throughput) and is_number(batch) and throughput > 0:
        return batch / throughput
    return None


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
