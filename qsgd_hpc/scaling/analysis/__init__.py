"""Analysis of attempts: medians, fits and verdicts; pure functions."""
