"""The shell in which PBS starts a job script.

PBS starts the user's login shell as the leader of the job's session and writes the script's path to
its standard input (OpenPBS, src/resmom/start_exec.c). The script is then a child of a shell without
traps, and `qsig`, which signals every process of the session (linux/mom_mach.c, kill_session), ends
that shell and so the job. ``qsub -S`` names another program in its place.
"""

from __future__ import annotations

import re

from qsgd_hpc.jobs.model import Job
from qsgd_hpc.jobs.registry import write_file

__all__ = ["shell_option"]

# PBS sets SHELL to what it starts; the user's own is in PBS_O_SHELL.
_TEXT = """\
#!/bin/bash
# PBS starts this as the shell of the job (qsub -S). It becomes the login shell that PBS would have
# started, and that becomes the job script: so the script gets the signals that PBS sends.
SHELL=${{PBS_O_SHELL:-/bin/bash}}
[ -x "$SHELL" ] || SHELL=/bin/bash
export SHELL
exec -a "-${{SHELL##*/}}" "$SHELL" -c 'exec {command}' < /dev/null
"""
# A list of paths is written with "," and "@"; the rest needs quotes in one shell or another.
_PLAIN = re.compile(r"[A-Za-z0-9_/.+-]+")


def shell_option(job: Job) -> list[str]:
    """Write the shell of a job into its folder and return the option of qsub that names it.

    None where the path of the folder cannot be written so, a template of the user's names no
    interpreter, or the request names a shell itself: PBS then does what it does without the option.
    """
    shell = job.directory / "shell"
    chosen = any(line.removeprefix("#PBS").split()[:1] == ["-S"] for line in job.request.extra)
    with job.script_path.open(encoding="utf-8", errors="surrogateescape") as script:
        mark, _, interpreter = script.readline().strip().partition("#!")
    command = f"{interpreter.strip()} {job.script_path}"
    if chosen or mark or not interpreter or not all(map(_PLAIN.fullmatch, command.split(" "))):
        return []
    write_file(shell, _TEXT.format(command=command))
    shell.chmod(0o755)
    return ["-S", str(shell)]
