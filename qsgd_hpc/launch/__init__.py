"""Start ranks with the MPI in use: ``qsgd-hpc run``. Imports neither MPI nor a framework.

Nothing is imported here: training scripts need only what describes a rank, not the launcher.
"""
