"""Data of qsgd_hpc (see README.md here); holds no code that anyone imports."""
