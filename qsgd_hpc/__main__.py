"""``python -m qsgd_hpc``: the command line, if its script is not on PATH."""

from qsgd_hpc.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
