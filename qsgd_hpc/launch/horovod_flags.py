"""The flags of horovodrun as options: the setting of each, or the reason why it has no effect."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.option_types import GroupedOption

__all__ = [
    "GROUP",
    "IGNORED",
    "SETTINGS",
    "effects",
    "horovod_options",
    "read_config",
    "refuse_discovery",
    "unused_arguments",
]


def name_of(option: str) -> str:
    """Return a flag's name as a Python argument."""
    return option[2:].replace("-", "_")


@dataclass(frozen=True)
class Setting:
    """One flag that sets a variable for the ranks.

    Args:
        option: its name on the command line.
        variable: the variable that it sets.
        what: one line for --help; empty if the next flag's line describes it, too.
        key: its section and key in a configuration file.
        kind: bool for a flag with a ``--no-`` form, else the type of its value.
        text: converts its value to the text of the variable; None leaves the variable unset.
    """

    option: str
    variable: str
    what: str
    key: tuple[str, str]
    kind: type = str
    text: Callable[[Any], str | None] = str

    @property
    def name(self) -> str:
        """The name as a Python argument."""
        return name_of(self.option)


@dataclass(frozen=True)
class Ignored:
    """One flag that has no effect.

    Args:
        option: its name on the command line.
        why: why it has no effect.
        also: other names of it.
        values: number of its values.
        key: its section and key in a configuration file, if it has one.
    """

    option: str
    why: str
    also: tuple[str, ...] = ()
    values: int = 1
    key: tuple[str, str] | None = None


def _on_off(value: bool) -> str:
    return "1" if value else "0"


def _zero_if_off(value: bool) -> str | None:
    return None if value else "0"


SETTINGS = (
    Setting("--fusion-threshold-mb", "QSGD_FUSION_BYTES",
            "Largest fused reduction, in MiB of gradients.", ("params", "fusion_threshold_mb"),
            float, lambda mb: str(int(mb * 2**20))),
    Setting("--cycle-time-ms", "QSGD_CYCLE_TIME_MS",
            "Time to wait for more tensors to fuse, in ms.", ("params", "cycle_time_ms"),
            float),
    Setting("--cache-capacity", "QSGD_CACHE_CAPACITY",
            "Tensors announced by number instead of name; 0: none.",
            ("params", "cache_capacity"), int),
    Setting("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE",
            "Reduce within each node first.", ("params", "hierarchical_allreduce"),
            bool, _on_off),
    Setting("--autotune", "QSGD_AUTOTUNE",
            "Tune settings during the training.", ("autotune", "enabled"),
            bool, _on_off),
    Setting("--autotune-log-file", "QSGD_AUTOTUNE_LOG",
            "CSV file for the trials of autotuning.", ("autotune", "log_file")),
    Setting("--timeline-filename", "QSGD_TIMELINE",
            "File for a timeline, for Perfetto.", ("timeline", "filename")),
    Setting("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES",
            "Mark the engine's cycles in the timeline.", ("timeline", "mark_cycles"),
            bool, _on_off),
    Setting("--stall-check", "QSGD_STALL_WARNING_S",
            "Warn of tensors that some ranks have not submitted (default: on).",
            ("stall_check", "enabled"),
            bool, _zero_if_off),
    Setting("--stall-check-warning-time-seconds", "QSGD_STALL_WARNING_S",
            "Time until that warning.", ("stall_check", "warning_time_seconds"), float),
    Setting("--stall-check-shutdown-time-seconds", "QSGD_STALL_SHUTDOWN_S",
            "Time until such a tensor ends the job.", ("stall_check", "shutdown_time_seconds"),
            float),
    Setting("--log-level", "QSGD_LOG_LEVEL",
            "Lowest level that is printed: trace, debug, info, warning, error, fatal or off.",
            ("logging", "level")),
)  # fmt: skip

_TUNER = "the autotuner of qsgd-hpc has no such parameter"
_FIXED = "the number of ranks of a job is fixed by -np"
_STAMP = "the engine's messages have no timestamps; --prefix-output-with-timestamp adds them"
_IGNORED = (
    Ignored("--gloo", "MPI starts the ranks; the script needs no change", values=0),
    Ignored("--mpi", "MPI is always used", values=0),
    Ignored("--jsrun", "the launcher of the MPI in use starts the ranks", values=0),
    Ignored("--disable-cache", "results of host checks are not cached", values=0),
    Ignored("--ssh-port", "mpiexec starts the ranks; set Port for the host in ~/.ssh/config",
            also=("-p",)),
    Ignored("--ssh-identity-file", "mpiexec starts the ranks; set IdentityFile in ~/.ssh/config",
            also=("-i",)),
    Ignored("--min-np", _FIXED, also=("--min-num-proc",)),
    Ignored("--max-np", _FIXED, also=("--max-num-proc",)),
    Ignored("--slots-per-host", _FIXED),
    Ignored("--elastic-timeout", _FIXED),
    Ignored("--reset-limit", _FIXED),
    Ignored("--blacklist-cooldown-range", _FIXED, values=2),
    Ignored("--hierarchical-allgather", "the algorithm is chosen by the layout of the ranks",
            also=("--no-hierarchical-allgather",),
            values=0, key=("params", "hierarchical_allgather")),
    Ignored("--autotune-warmup-samples", _TUNER, key=("autotune", "warmup_samples")),
    Ignored("--autotune-steps-per-sample", _TUNER, key=("autotune", "steps_per_sample")),
    Ignored("--autotune-bayes-opt-max-samples", _TUNER, key=("autotune", "bayes_opt_max_samples")),
    Ignored("--autotune-gaussian-process-noise", _TUNER,
            key=("autotune", "gaussian_process_noise")),
    Ignored("--mpi-threads-disable", "the engine needs an MPI with threads",
            also=("--no-mpi-threads-disable",),
            values=0, key=("library_options", "mpi_threads_disable")),
    Ignored("--tcp", "MPI chooses the network; --network-interfaces restricts it", values=0),
    Ignored("--num-nccl-streams", "the engine has one stream on each GPU",
            key=("library_options", "num_nccl_streams")),
    Ignored("--thread-affinity", "the engine's thread sleeps when idle and shares the rank's cores",
            key=("library_options", "thread_affinity")),
    Ignored("--gloo-timeout-seconds", "gloo is not used",
            key=("library_options", "gloo_timeout_seconds")),
    Ignored("--log-with-timestamp", _STAMP, values=0, key=("logging", "with_timestamp")),
    Ignored("--log-without-timestamp", _STAMP, values=0),
    Ignored("--log-hide-timestamp", _STAMP, also=("--no-log-hide-timestamp",), values=0),
)  # fmt: skip
IGNORED = {each.option: each for each in _IGNORED}
"""Flags of horovodrun that have no effect, by option."""


def variables_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that flags set.

    Args:
        values: flags' values by argument name; None if not given.

    Raises:
        UsageError: a value that its variable cannot have.
    """
    found: dict[str, str] = {}
    for setting in SETTINGS:
        value = values.get(setting.name)
        text = None if value is None else setting.text(value)
        if text is not None:
            found.setdefault(setting.variable, text)
    # A flag wins against another variable of the environment, too; empty is unset.
    others: list[str] = []
    if values.get("hierarchical_allreduce") is not None:
        others.append("QSGD_ALGORITHM")
    if values.get("stall_check") is True:
        others += ["QSGD_STALL_WARNING_S", "HOROVOD_STALL_CHECK_DISABLE"]
    found |= {name: "" for name in others if os.environ.get(name) and name not in found}
    if values.get("stall_check") is False:
        found["QSGD_STALL_SHUTDOWN_S"] = "0"
    for name in filter(env.TABLE.__contains__, found):
        env.get(name, found)
    return found


def read_config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read horovodrun's YAML configuration.

    Returns:
        Values by argument name, and the options in it that have no effect here.
    Raises:
        UsageError: the file cannot be read, or has unknown sections or keys or values of a wrong
            type; one per line.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"--config-file {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config-file {path}: {error}") from None
    places = {setting.key: setting for setting in SETTINGS}
    without_effect = {each.key: option for option, each in IGNORED.items() if each.key}
    values: dict[str, Any] = {}
    unused, faults = [], []
    for key, value in _leaves(content):
        where = f"--config-file {path}: {'.'.join(key)}"
        if key in places:
            try:
                values[places[key].name] = _converted(places[key], value)
            except ValueError:
                faults.append(f"{where} is {value!r}; expected a {places[key].kind.__name__}")
        elif key in without_effect:
            unused.append(without_effect[key])
        elif key == ("controller",) and str(value).lower() in ("gloo", "mpi"):
            unused.append(f"--{value.lower()}")
        elif key == ("verbose",):
            values["verbose"] = bool(value)
        else:
            known = [".".join(each) for each in (*places, *without_effect, ("verbose",))]
            near = difflib.get_close_matches(".".join(key), known, n=1)
            faults.append(f"{where} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    if faults:
        raise UsageError("\n".join(faults))
    return values, unused


def _leaves(content: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    if not isinstance(content, dict):
        yield (str(content),), None
        return
    for section, inside in content.items():
        if isinstance(inside, dict):
            for key, value in inside.items():
                if value is not None:
                    yield (str(section), str(key)), value
        elif inside is not None:
            yield (str(section),), inside


def _converted(setting: Setting, value: Any) -> Any:
    if setting.kind is bool and not isinstance(value, bool):
        raise ValueError
    return setting.kind(value)


GROUP = "Tuning and observing, as horovodrun"


def horovod_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; its function gets them as keyword arguments."""
    for option, flag in reversed(IGNORED.items()):
        value: dict[str, Any] = {"is_flag": True, "default": None}
        if flag.values:
            value = {"nargs": flag.values}
        names = (option, *flag.also, name_of(option))
        function = click.option(*names, hidden=True, **value)(function)
    for setting in reversed(SETTINGS):
        function = _option(setting)(function)
    return function


def _option(setting: Setting) -> Callable[..., Any]:
    shared: dict[str, Any] = {"cls": GroupedOption, "group": GROUP, "help": setting.what}
    if setting.kind is bool:
        names = f"{setting.option}/--no-{setting.option[2:]}"
        return click.option(names, default=None, **shared)
    metavar = {float: "X", int: "N", str: "TEXT"}[setting.kind]
    return click.option(setting.option, type=setting.kind, metavar=metavar, **shared)


def effects(
    given: Mapping[str, Any], config: Path | None
) -> tuple[dict[str, str], bool, list[str]]:
    """Return the effects of flags and of a configuration file.

    Args:
        given: flags' values by argument name, None if not given; they override the file.
        config: horovodrun's configuration file.

    Returns:
        The variables for the ranks, whether the file sets ``verbose``, and remarks on flags that
        have no effect.
    Raises:
        UsageError: the file is invalid.
    """
    values, unused = ({}, []) if config is None else read_config(config)
    values |= {name: value for name, value in given.items() if value is not None}
    unused += [each for each in IGNORED if given.get(name_of(each))]
    remarks = [f"{each}: {IGNORED[each].why}" for each in unused]
    return variables_of(values), values.get("verbose", False), remarks


# Arguments of Horovod's run() whose flags have other names.
_FLAGS = {
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "cooldown_range": "--blacklist-cooldown-range",
}


def refuse_discovery(script: str | None, name: str, hosts: str, ranks: str) -> None:
    """Raise if a script is given that names the hosts while the job runs.

    Args:
        script: it.
        name: the flag or argument with the script.
        hosts: where to list the hosts instead, such as "with -H".
        ranks: the flag or argument for the number of ranks.
    Raises:
        UsageError: a script is given.
    """
    if script is not None:
        raise UsageError(
            f"{name}: hosts cannot join or leave a running job in this version; list them "
            f"{hosts} and start a fixed number of ranks with {ranks}"
        )


def unused_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return why arguments of Horovod's ``run()`` have no effect, one sentence for each.

    Raises:
        TypeError: an argument that Horovod does not have.
        UsageError: ``host_discovery_script``.
    """
    remarks = []
    for name, value in arguments.items():
        if name == "host_discovery_script":
            refuse_discovery(value, name, "in hosts=", "np=")
            continue
        flag = IGNORED.get(_FLAGS.get(name, f"--{name.replace('_', '-')}"))
        if flag is None:
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
        if value:
            remarks.append(f"{name}={value!r}: {flag.why}; the argument has no effect")
    return remarks
