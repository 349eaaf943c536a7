"""Data of qsgd_hpc; contains no code."""
