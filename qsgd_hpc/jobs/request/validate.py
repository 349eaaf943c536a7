"""Fill a request from the site's profile, and find all its faults. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.sites.queues import AUTO, crowd_fault, limit_words, pick, queue_faults, remark
from qsgd_hpc.jobs.words import clock, did_you_mean, listing
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.network import MOST_HOSTS
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = [
    "choice_faults",
    "complete",
    "default_stop_before",
    "fill",
    "home_faults",
    "network_faults",
    "request_faults",
    "site_faults",
    "site_notes",
]

# Schedulers do not agree on quotes in directive lines, so these characters only are allowed.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# Slurm accepts every name, but a directive line cannot quote what a shell would expand.
_NAME, _SLURM_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*"), re.compile(r"[!%&(-\[\]^_a-~]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PBS_NAME_LENGTH = 15  # characters of a job's name that PBS shows
NODES_CEILING = 1_000_000
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Directives that set the walltime.
_TIMES = {
    "slurm": re.compile(r"--time[= ]|-t"),
    "pbs": re.compile(r"-l\s*(\S+,)?walltime="),
    "lsf": re.compile(r"-W\s*\d"),
    "cobalt": re.compile(r"--time[= ]|-t"),
}
_UNQUOTABLE = re.compile(r"[\"'\\`$#]|[^ -~]")  # see the filter `directive`
_QUOTED = re.compile(r"""(["'])([^\s"'\\`$#]*)\1""")  # a word that needs no quotes
STOP_BEFORE_MIN, STOP_BEFORE_SHARE = 5.0, 0.1
TASKS_CEILING = 10_000


def fill(request: JobRequest, site: Site, own_account: str | None = None) -> JobRequest:
    """Return the request with all defaults filled in: argument, environment, profile, default.

    Args:
        request: the user's request.
        site: the profile.
        own_account: the account of the environment, if set there.
    """
    # That of the environment is meant for batch jobs; one given for this machine is noted.
    known = None if site.scheduler == "local" else own_account
    account = request.account or known or site.default_account
    if account and site.account_suffix and not account.endswith(site.account_suffix):
        account += site.account_suffix
    walltime_min = request.walltime_min
    if walltime_min is None:
        walltime_min = site.default_walltime_min
    queue = request.queue or site.default_queue
    if queue == AUTO and AUTO not in site.queues:
        queue = None
    if queue is None and (picked := pick(site, request.nodes, walltime_min)):
        queue = picked.name
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        ranks_per_node = site.ranks_per_node or site.at(queue).gpus or 1
    return dataclasses.replace(
        request,
        site=site.name,
        ranks_per_node=ranks_per_node,
        walltime_min=walltime_min,
        queue=queue,
        account=account,
        network=request.network or site.emulated_network,
        filesystems=request.filesystems or site.default_filesystems,
        name=request.name or _name_from(request.script.stem, site.scheduler),
    )


def _name_from(words: str, scheduler: str) -> str:
    """Return a name made of these words that every scheduler accepts and PBS shows completely."""
    longest = PBS_NAME_LENGTH if scheduler == "pbs" else None
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", words)[:longest].strip("_.+-")
    return plain if plain[:1].isalpha() else f"job_{plain}"[:longest].rstrip("_")


def request_faults(request: JobRequest) -> Iterator[str]:
    """Yield the faults that do not depend on a profile."""
    if not 1 <= request.nodes <= NODES_CEILING:
        yield f"--nodes {request.nodes}: a job has 1 to {NODES_CEILING} nodes. Use such a number."
    per_node = request.ranks_per_node
    if per_node is not None and per_node < 1:
        yield (
            f"--ranks-per-node {per_node}: a node needs at least 1 rank. Remove the option, "
            "or use 1."
        )
    if request.walltime_min is not None and request.walltime_min <= 0:
        yield f"--walltime of {request.walltime_min:g} minutes: use a positive time, such as 30m."
    for key, value in request.env.items():
        if not _VARIABLE.fullmatch(key):
            yield (
                f"--env {key!r}: a name may contain letters, digits and _. Write --env NAME=VALUE."
            )
        elif "\0" in value:
            yield (
                f"--env {key}: the value contains a NUL byte, which is not possible in an "
                "environment."
            )
    if request.horovod and not request.is_python:
        yield (
            f"--horovod is for Python scripts, but {request.script} is executed directly. Use a "
            "script that ends in .py, or add --python."
        )
    if any("\0" in word for word in (str(request.script), *request.script_args)):
        yield (
            "the script or one of its arguments contains a NUL byte, which is not possible "
            "in a command."
        )


def _name_faults(request: JobRequest, scheduler: str) -> Iterator[str]:
    slurm = scheduler == "slurm"
    if request.name and not (_SLURM_NAME if slurm else _NAME).fullmatch(request.name):
        plain = "letters, digits and _ . + - after a letter"
        rule = "printable ASCII without spaces, quotes, $, # and backslashes" if slurm else plain
        yield (
            f"--name {request.name!r}: a job's name is {rule} here. "
            f"Try --name {_name_from(request.name, scheduler)}."
        )


def site_faults(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield every fault of a filled request on a site, with its remedy."""
    yield from _name_faults(request, site.scheduler)
    yield from queue_faults(site, request.queue, request.nodes, request.walltime_min)
    yield from _missing(request, site)
    yield from _array_and_chain(request, site)
    yield from _gpus(request, site)
    yield from _libraries(request, site)
    yield from network_faults(request, site)
    for name in request.filesystems:
        if site.filesystems and name not in site.filesystems:
            yield f"{site.name} has no filesystem '{name}'. {did_you_mean(name, site.filesystems)}"
        elif not _PLAIN_WORD.fullmatch(name):
            yield f"--filesystems {name!r}: names may contain letters, digits and _ . + -"
    account = _SLURM_NAME if site.scheduler == "slurm" else _PLAIN_WORD
    for flag, value, rule in (
        ("account", request.account, account),
        ("queue", request.queue, _PLAIN_WORD),
    ):
        if value and not rule.fullmatch(value):
            yield f"--{flag} {value!r}: a name may contain letters, digits and _ . + - here."


def _array_and_chain(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield violations of the queue's rules on arrays and on job dependencies."""
    queue = site.queues.get(request.queue or "")
    if queue is None:
        return
    what = f"{site.queue_kind} '{queue.name}' of {site.name}"
    most = queue.array_at_once
    if most and request.array and (request.at_once is None or request.at_once > most):
        yield f"{what} runs at most {most} tasks of an array at a time. Use --at-once {most}."
    if not queue.chain and (request.chain > 1 or request.after):
        flag = "--chain" if request.chain > 1 else "--after"
        others = [
            q.name
            for q in site.queues.values()
            if q.chain and not q.via and q.takes(request.nodes, request.walltime_min)
        ]
        remedy = f", or use --queue {listing(others)}" if others else ""
        yield f"{what} does not allow job dependencies. Remove {flag}{remedy}."
    elif fault := crowd_fault(site, queue, request):
        yield fault


def _gpus(request: JobRequest, site: Site) -> Iterator[str]:
    own = site.at(request.queue)
    where = f"of {site.name}" + ("" if own is site else f" in {site.queue_kind} {request.queue}")
    view = request.gpu_view
    can_share = own.gpu is not None and own.gpu.bound_by != "launcher"
    if 0 < own.gpus < (request.ranks_per_node or 0) and not (can_share and view == "one"):
        share = (
            "; or add --gpu-view one, so that ranks share GPUs (faster with NVIDIA's MPS, which "
            "your job starts)"
        )
        yield (
            f"--ranks-per-node {request.ranks_per_node}: a node {where} has {own.gpus} GPUs, one "
            f"for each rank. Use --ranks-per-node {own.gpus} or fewer{share if can_share else ''}."
        )
    if view is None:
        return
    if view not in ("all", "one"):
        yield f"--gpu-view {view!r}: use all or one. {did_you_mean(view, ('all', 'one'))}"
    elif not own.gpus or own.gpu is None:
        yield f"--gpu-view {view}: the profile lists no GPUs {where}. Remove --gpu-view."
    elif own.gpu.bound_by == "launcher" and view != own.gpu.view:
        yield (
            f"--gpu-view {view}: the launcher of {site.name} shows each rank "
            f"{'its own GPU alone' if own.gpu.view == 'one' else 'every GPU'}. Remove "
            "--gpu-view."
        )


def _libraries(request: JobRequest, site: Site) -> Iterator[str]:
    known = [each.name for each in site.libraries]
    for name in request.without:
        if name not in known:
            has = (
                did_you_mean(name, known)
                if known
                else f"{site.name} has no settings for libraries."
            )
            yield f"--without {name}: no library of the profile has this name. {has}"


def site_notes(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield notes on a filled request for the user: limits, guesses."""
    if site.retired:
        yield f"{site.name} was retired: {site.retired}."
    if site.generic:
        yield (
            f"site '{site.name}' is the generic profile for {site.scheduler}, without the queues "
            "and GPUs of this machine. `qsgd-hpc sites new NAME` writes a profile from the "
            "scheduler's information; --site selects another."
        )
    if request.queue and site.scheduler == "local":
        yield f"--queue {request.queue} has no effect: the job runs on this machine."
    if request.account and site.scheduler == "local":
        yield f"--account {request.account} has no effect: the job runs on this machine."
    if request.filesystems and site.scheduler in ("local", "lsf"):
        named = ",".join(request.filesystems)
        yield f"--filesystems {named} has no effect: {site.scheduler} has no such request."
    if request.conda and site.setup:
        yield (
            f"before `conda activate {request.conda}`, the job runs the setup of {site.name}: "
            f"{'; '.join(site.setup)}. If the environment does not need it, override setup in "
            f"sites/{site.name}.yaml in QSGD_HOME (`qsgd-hpc sites show {site.name}`)."
        )
    queue = site.queues.get(request.queue or "")
    if queue is not None and (said := remark(queue)):
        yield f"{site.queue_kind} {queue.name}: {said}."
    yield from site.remarks
    if site.limits:
        yield f"limits of {site.name}: {limit_words(site.limits)}."
    if site.live_limits:
        yield f"limits of the day: `{site.live_limits}`."


def network_faults(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield the faults of the emulated network in a request."""
    if request.network is None:
        return
    if site.scheduler != "local":
        yield (
            f"--network {request.network}: {site.name} has its own network. Remove the option, "
            "or add --site local for emulated hosts on this machine."
        )
        return
    try:
        network = parse_network(request.network)
    except UsageError as error:
        yield from str(error).splitlines()
        return
    if network is not None and "{network}" not in site.launcher_argv and not request.alone:
        yield (
            f"--network {request.network}: the launcher of profile '{site.name}' does not "
            'contain it. Add "{network}" to launcher.argv, after run.'
        )
    elif network is not None and request.nodes > MOST_HOSTS:
        yield f"--network {request.network} has addresses for {MOST_HOSTS} nodes. Use fewer."


def _missing(request: JobRequest, site: Site) -> Iterator[str]:
    if "account" in site.required and not request.account:
        yield (
            f"{site.name} needs an account to charge. Use --account PROJECT, set QSGD_ACCOUNT, "
            f"or write defaults: {{account: PROJECT}} to $QSGD_HOME/sites/{site.name}.yaml."
        )
    if "walltime" in site.required and request.walltime_min is None:
        yield f"{site.name} needs a walltime. Use --walltime 30m."
    if "filesystems" in site.required and not request.filesystems:
        valid = listing(site.filesystems)
        yield (
            f"{site.name} needs the file systems that the job uses ({valid}). "
            f"Use --filesystems {','.join(site.filesystems) or 'NAME'}."
        )


def complete(request: JobRequest) -> JobRequest:
    """Fill in the time to stop, and convert an array of one task to a plain job.

    A script needs time to write its checkpoint: 5 minutes, or a tenth of a short walltime.
    """
    if request.stop_before_min is None and request.walltime_min is not None:
        before = default_stop_before(request.walltime_min)
        request = dataclasses.replace(request, stop_before_min=before)
    if len(request.tasks) == 1 and not any(_array_faults(request)):
        words = (*request.script_args, *request.tasks[0])
        request = dataclasses.replace(request, script_args=words, array={}, at_once=None)
    return request


def default_stop_before(walltime_min: float) -> float:
    """Return the minutes before the end of a walltime at which a script is asked to stop."""
    return min(STOP_BEFORE_MIN, STOP_BEFORE_SHARE * walltime_min)


def choice_faults(request: JobRequest, scheduler: str) -> list[str]:
    """Return every fault of these options, each with its remedy."""
    return [
        *_array_faults(request),
        *_chain_faults(request, scheduler),
        *_text_faults(request, scheduler),
    ]


def home_faults(folder: Path, scheduler: str) -> list[str]:
    """Return why a scheduler cannot write output to the folder of jobs, with the remedy."""
    text = str(folder)
    traits = SCHEDULERS[scheduler]
    if traits.bad_path is None:
        return []
    pattern, wrong = traits.bad_path
    if not re.search(pattern, text):
        return []
    return [
        f"the output would be written to {text!r}, but {traits.command} does not accept a path "
        f"with {wrong}. Set QSGD_HOME to another folder."
    ]


def _array_faults(request: JobRequest) -> Iterator[str]:
    for key, values in request.array.items():
        if not _OPTION.fullmatch(key):
            yield f"--array {key!r}: write the option without dashes, as in lr=0.1,0.2."
        if not values:
            yield f"--array {key}: it has no value. Write --array {key}=A,B."
        if any("\0" in value for value in values):
            yield (
                f"--array {key}: a value contains a NUL byte, which is not possible in a command."
            )
    # The options of a single task become the script's own, which are quoted.
    if len(request.tasks) > 1 and any(":" in values for values in request.array.values()):
        yield "--array: a value ':' would be mpiexec's separator of programs. Use another word."
    if len(request.tasks) > TASKS_CEILING:
        yield (
            f"--array creates {len(request.tasks)} tasks; the maximum is {TASKS_CEILING}. Split it."
        )
    if request.at_once is not None and not request.array:
        yield "--at-once limits the tasks of an array; add --array, or remove it."
    elif request.at_once is not None and request.at_once < 1:
        yield f"--at-once {request.at_once}: use at least 1."


def _chain_faults(request: JobRequest, scheduler: str) -> Iterator[str]:
    if request.chain < 1:
        yield f"--chain {request.chain}: a chain has at least 1 part."
    if request.chain > 1 and request.array:
        yield "--chain and --array exclude each other. Submit one chain for each choice."
    if request.requeue and not SCHEDULERS[scheduler].requeues:
        yield (
            f"--requeue: {scheduler} cannot restart a job automatically. Use --chain N, or "
            "`qsgd-hpc resubmit ID` after its end."
        )
    if request.requeue and request.chain > 1:
        yield "--requeue and --chain both continue a job that stopped. Use one of them."
    if request.chain > 1 and not SCHEDULERS[scheduler].waits_for_any:
        yield (
            f"--chain: jobs of {scheduler} can wait for success only. Use `qsgd-hpc resubmit ID`."
        )
    before, walltime_min = request.stop_before_min, request.walltime_min
    if before and walltime_min is None:
        yield "--stop-before: the job has no walltime before which to stop. Add --walltime."
    if before is None or walltime_min is None:
        return
    if before < 0 or before >= walltime_min:
        yield (
            f"--stop-before {clock(max(before, 0))}: the walltime of the job is "
            f"{clock(walltime_min)}. Use a shorter time."
        )


def _extra_remedy(line: str, prefix: str) -> str:
    bare = _QUOTED.sub(r"\2", line)
    if not _UNQUOTABLE.search(bare.removeprefix(prefix)):
        return f"leave out the quotes, as no shell reads this line: --extra '{bare}'."
    return (
        "quotes, $, #, `, backslashes and non-ASCII characters are not possible in a directive. "
        "Use --template with a copy of the included template, and write the line there."
    )


def _text_faults(request: JobRequest, scheduler: str) -> Iterator[str]:
    prefix = SCHEDULERS[scheduler].directive
    batch = [each.directive for each in SCHEDULERS.values() if each.command]
    for line in request.extra:
        others = [each for each in batch if line.startswith(each)]
        if "\n" in line or not line.removeprefix(prefix).strip():
            yield f"--extra {line!r}: one directive, on one line, such as '{prefix} -X value'."
        elif scheduler == "local":
            yield f"--extra {line!r}: there is no scheduler here to read it. Remove it."
        elif others and prefix not in others:
            yield (
                f"--extra {line!r}: this is a directive for {others[0][1:]}; here, directives "
                f"begin with {prefix}."
            )
        elif scheduler in _TIMES and _TIMES[scheduler].match(line.removeprefix(prefix).strip()):
            yield f"--extra {line!r}: use --walltime, which should_stop() knows."
        elif _UNQUOTABLE.search(line.removeprefix(prefix)):
            yield f"--extra {line!r}: {_extra_remedy(line, prefix)}"
    if request.exclude and not SCHEDULERS[scheduler].excludes:
        yield (
            f"--exclude: {scheduler} does not support it. Remove it and report bad nodes to the "
            f"site, or request other nodes with --extra '{prefix} ...'."
        )
    for node in request.exclude:
        if not _HOST.fullmatch(node):
            yield f"--exclude {node!r}: write names of nodes, as in --exclude nid0001,nid0002."
    words = {"--modules": request.modules, "--conda": (request.conda or "-",)}
    for flag, names in words.items():
        if any(not name.strip() or not name.isprintable() for name in names):
            yield f"{flag} {listing(map(repr, names), 'and')}: use printable names."
    if request.key is not None and not request.key.strip():
        yield (
            "--key: the key is empty. Use one that is unique to this submission, such as a date."
        )
