"""From attempts to results: medians, fits and verdicts; pure functions."""
