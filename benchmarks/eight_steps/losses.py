"""Convert the twelve serial scripts of the tests, run them, and compare the last losses.

    python benchmarks/eight_steps/losses.py          # about five minutes on two cores

Prints a table in Markdown: the serial script, its conversion on one rank, and on two. Two ranks do
half as many steps, with batches twice as large.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SERIAL = Path(__file__).parents[2] / "tests" / "convert" / "serial"
LOSS = re.compile(r"(?i)^epoch.*?loss:? ([\d.]+)", re.M)
CLI = [sys.executable, "-m", "qsgd_hpc"]


def losses(*command: str | Path) -> list[str]:
    """Run a training and return the loss of each epoch."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command}:\n{done.stdout}{done.stderr}")
    return LOSS.findall(done.stdout)


def main() -> None:
    """Print the table."""
    print("| script | first loss | last loss, serial | 1 rank | 2 ranks | left to decide |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for script in sorted(SERIAL.glob("*.py")):
            out = Path(folder) / script.name
            convert = [*CLI, "convert", str(script), "-o", str(out)]
            subprocess.run(convert, capture_output=True, check=True)
            serial = losses(sys.executable, script)
            one, two = (losses(*CLI, "run", "-np", str(n), out) for n in (1, 2))
            marks = out.read_text(encoding="utf-8").count("# qsgd-hpc: TODO")
            cells = (script.stem, serial[0], serial[-1], one[-1], two[-1], str(marks))
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
