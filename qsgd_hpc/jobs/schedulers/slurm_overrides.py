"""Variables of the user that would change a job script's directives. Pure.

sbatch reads its options, then variables such as SBATCH_ACCOUNT, then the directives of the script.
A variable in the user's profile would thus override what the script, and the request, say.

sbatch also passes its variables to the job. In a job that another one submits, srun would read the
other's cores, memory and GPUs from SLURM_CPU_BIND, SLURM_MEM_PER_CPU and the like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from qsgd_hpc.launch.claims import OF_ONE_RANK

__all__ = ["overriding_variables"]

# They would make a job an array, write its errors to another file, or make sbatch wait for its end.
_ALWAYS = frozenset({"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_WAIT"})
_REQUEUE = ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")
_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--([a-z][a-z-]*)|-([A-Za-z]))")
_LETTERS = {
    "A": "account",
    "C": "constraint",
    "J": "job-name",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
# Other variables are named as their option.
_NAMED = {
    "time": ("SBATCH_TIMELIMIT",),
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
}


# How Slurm is reached, whatever job this is.
_OF_THE_MACHINE = re.compile(r"SLURM_(CONF\w*|JWT|SACK\w*)")


def overriding_variables(script: str, environ: Mapping[str, str]) -> frozenset[str]:
    """Return the variables that would override directives of a job script."""
    found = set(_ALWAYS)
    if "SLURM_JOB_ID" in environ:
        found.update(
            name
            for name in environ
            if OF_ONE_RANK.fullmatch(name)
            or (name.startswith("SLURM_") and not _OF_THE_MACHINE.fullmatch(name))
        )
    for match in map(_DIRECTIVE.match, script.splitlines()):
        name = match and (match[1] or _LETTERS.get(match[2]))
        if name:
            found.update(_NAMED.get(name, (f"SBATCH_{name.replace('-', '_').upper()}",)))
    return frozenset(found)
