"""Write the tables of docs/settings.md from qsgd_hpc/env.py, where every variable is one row.

The page is kept in the repository so that it can be read on a code host. `make docs` updates it,
and a test fails if it is out of date.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.rules import parse_rules

PAGE = Path(__file__).parents[1] / "settings.md"
TABLE = re.compile(r"(<!-- (\w+): written by \S+ -->\n).*?(<!-- end -->)", re.S)
# The page itself, and docs/compression.md, describe these values.
VALUES = {env.flag: "a boolean", str: "text", parse_rules: "rules"}


def settings() -> str:
    """Return the table of this package's variables."""
    lines = ["| variable | meaning | values | default |", "|---|---|---|---|"]
    for name, row in env.TABLE.items():
        if row.of_jobs or not name.startswith("QSGD_"):
            continue
        default = "" if row.default in (None, ()) else f"`{_said(row.default)}`"
        if row.horovods is not None:
            default += f"; `{_said(row.horovods)}` where the script imports `horovod`"
        lines.append(f"| `{name}` | {row.what} | {_values(row)} | {default} |")
    return "\n".join(lines)


def _values(row: env.Variable) -> str:
    return VALUES.get(row.parse) or (row.parse.__doc__ or "").rstrip(".")


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_jobs() -> str:
    """Return the table of the variables that users do not set."""
    lines = ["| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {row.what} |" for name, row in env.TABLE.items() if row.of_jobs]
    return "\n".join(lines)


def twins() -> str:
    """Return the table of Horovod's variables."""
    here: dict[str, list[str]] = defaultdict(list)
    for name, row in env.TABLE.items():
        if not name.startswith("QSGD_"):
            here[name].append(row.what)
        for twin in row.twins:
            here[twin.name].append(f"`{name}`" + (f" ({twin.remark})" if twin.remark else ""))
    lines = ["| variable of Horovod | variable here |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(found)} |" for name, found in here.items()]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with its tables as they should be."""
    tables = {"settings": settings, "of_jobs": of_jobs, "twins": twins}
    return TABLE.sub(lambda m: f"{m[1]}\n{tables[m[2]]()}\n\n{m[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
