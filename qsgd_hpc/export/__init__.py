"""``qsgd-hpc export``: a trained model without anything of this package in it."""

from qsgd_hpc.export.convert import export_model

__all__ = ["export_model"]
