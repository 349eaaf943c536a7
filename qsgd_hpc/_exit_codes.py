"""Exit codes that mean something to a job script."""

EXIT_RESUBMIT = 85
"""The training stopped at a checkpoint and asks to be submitted again."""
