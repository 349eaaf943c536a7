"""``qsgd-hpc export``: exports trained models so that they do not depend on this package."""

from qsgd_hpc.export.convert import export_model

__all__ = ["export_model"]
