"""The words for how a script ended; the same for every scheduler."""

from __future__ import annotations

import signal

from qsgd_hpc.errors import EXIT_RESUBMIT

__all__ = ["NOT_MET", "NO_MEMORY", "PREEMPTED", "WALLTIME", "exit_words", "node_words"]

NOT_MET = "a job that it waited for did not complete"
NO_MEMORY = (
    "a node ran out of memory: use fewer --ranks-per-node, more --nodes or a smaller batch, or ask "
    "for more memory"
)
PREEMPTED = (
    "a job with precedence took its nodes: submit it again; --requeue lets the scheduler do that"
)
WALLTIME = "ended at its walltime: use a longer --walltime, or let it stop at a checkpoint"


def exit_words(code: int) -> str:
    """Return why a script with this exit code is not done; 128 + n stands for signal n."""
    if code == EXIT_RESUBMIT:
        return "it stopped at a checkpoint and asks to be submitted again"
    try:
        return f"ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"the script ended with exit code {code}"


def node_words(nodes: tuple[str, ...]) -> str:
    """Return why a job ended whose nodes failed; () when nobody says which."""
    if not nodes:
        return "a node of the job failed"
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} failed"
