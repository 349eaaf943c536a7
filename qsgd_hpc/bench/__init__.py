"""``qsgd-hpc bench``: how fast this machine codes and reduces, beside its limits and its peers."""
