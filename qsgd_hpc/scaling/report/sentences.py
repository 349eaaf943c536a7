"""Sentences on the fitted laws, the link and the verdicts of a case."""

from __future__ import annotations

import math
from collections.abc import Callable

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.fits import peak_ranks
from qsgd_hpc.scaling.analysis.results import BreakEven, CaseAnalysis, Estimate, Fit, LinkFit

__all__ = ["law_sentence", "link_sentence", "links", "verdict_words"]

_LAWS = {
    "amdahl": "Amdahl’s law",
    "gustafson": "Gustafson’s law",
    "usl": "Universal scalability law",
}
_PARAMETERS = {
    "serial": ("serial share", units.percent),
    "contention": ("contention", units.percent),
    "coherency": ("coherency", lambda value: f"{value:.2g}"),
}
_VERDICTS = {"yes": "Yes", "no": "No", "undecided": "Undecided"}


def law_sentence(fit: Fit) -> str:
    """Return a fitted law's parameters with their intervals, its residuals and its caution."""
    named = []
    for name, estimate in fit.parameters.items():
        title, form = _PARAMETERS.get(name, (name, lambda value: f"{value:.3g}"))
        named.append(f"{title} {_estimate(estimate, form)}")
    if (peak := peak_ranks(fit)) is not None:
        ranks = _estimate(peak, lambda value: f"{value:.0f}")
        named.append(f"most throughput at {ranks} rank{'' if ranks == '1' else 's'}")
    sizes = f"{fit.sizes} sizes" if fit.sizes != 1 else "1 size"
    text = (
        f"{_LAWS.get(fit.law, fit.law)}, {units.bits_name(fit.bits)}: {', '.join(named)}; "
        f"residuals {units.percent(fit.error)} of the speed-up over {sizes}."
    )
    return f"{text} {fit.caution}".rstrip()


def link_sentence(link: LinkFit) -> str:
    """Return Hockney's latency and bandwidth as text."""
    text = (
        f"Fitted to the communication: {_estimate(link.latency_s, units.seconds)} per message and "
        f"{_estimate(link.bandwidth, units.bandwidth)} per rank; residuals "
        f"{units.percent(link.error)} over {link.points} points."
    )
    return f"{text} {link.caution}".rstrip()


def links(case: CaseAnalysis) -> list[str]:
    """Return the sentence on the link in a list, which is empty if none was fitted."""
    return [] if case.link is None else [link_sentence(case.link)]


def verdict_words(verdict: BreakEven) -> str:
    """Return 'Yes', 'No' or 'Undecided'."""
    return _VERDICTS.get(verdict.verdict, verdict.verdict)


def _estimate(estimate: Estimate, form: Callable[[float], str]) -> str:
    value = "unbounded" if math.isinf(estimate.value) else form(estimate.value)
    if estimate.low is None:
        return value
    if estimate.high is None:
        return f"{value} ({form(estimate.low)} or more)"
    return f"{value} ({form(estimate.low)}..{form(estimate.high)})"
