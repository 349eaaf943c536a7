"""The results as a LaTeX table for a paper; it needs only booktabs."""

from __future__ import annotations

from collections.abc import Sequence

from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.case_findings import reference_name
from qsgd_hpc.scaling.report.cells import cells, headings

__all__ = ["escape", "table", "tables"]

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    # In mathematics, because some engines and fonts lack these signs in text.
    "×": r"$\times$",
    "–": "--",
    "−": r"$-$",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "’": "'",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
}
# In text, two dots mark a range; in the table it is an en dash.
_RANGE = ".."
# Columns left out because a page of an article is narrower than a screen.
_LEFT_OUT = ("total_bytes", "communication", "step", "compression", "nmse", "target")


def escape(text: str) -> str:
    """Return text escaped for LaTeX; other non-ASCII characters are unchanged."""
    return "".join(_ESCAPES.get(sign, sign) for sign in text)


def tables(cases: Sequence[CaseAnalysis], source: str) -> str:
    """Return one table for each case, to be read with \\input; `source` becomes a comment."""
    comment = " ".join(source.split())
    head = f"% {comment}\n% Needs \\usepackage{{booktabs}}.\n"
    return head + "\n".join(table(case) for case in cases)


def table(case: CaseAnalysis) -> str:
    """Return a case's results as a table float with caption and label."""
    columns = [(key, name) for key, name in headings(case) if key not in _LEFT_OUT]
    rows = case.rows()
    several = case.table["throughput_lo"].notna().any()
    brackets = r"; in brackets: 95\% intervals" if several else ""
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize",
        r"  \setlength{\tabcolsep}{3pt}",
        f"  \\caption{{Scaling of {escape(case.case.label)}. Speed-up refers to "
        f"{escape(reference_name(case))}{brackets}.}}",
        f"  \\label{{tab:scaling-{_label(case.case.key)}}}",
        f"  \\begin{{tabular}}{{rl{'r' * (len(columns) - 2)}}}",
        r"    \toprule",
        *(f"    {' & '.join(line)} \\\\" for line in _heads([name for _, name in columns])),
        r"    \midrule",
    ]
    before = None
    for row in rows:
        if before not in (None, row["ranks"]):
            lines.append(r"    \addlinespace")
        before = row["ranks"]
        text = cells(row, case)
        lines.append(f"    {' & '.join(_cell(text, key) for key, _ in columns)} \\\\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def _heads(names: Sequence[str]) -> list[list[str]]:
    """Return the headings as two lines, for narrow columns."""
    parts = [name.partition(" ") for name in names]
    return [[escape(first) for first, _, _ in parts], [escape(rest) for _, _, rest in parts]]


def _cell(text: dict[str, str], key: str) -> str:
    spread = text["speed_range"].replace(_RANGE, "–") if key == "speed" else ""
    return escape(f"{text[key]} ({spread})" if spread else text[key])


def _label(key: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in key)
