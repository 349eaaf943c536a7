"""``qsgd-hpc bench``: benchmarks of codecs and allreduces, with limits and peers."""
