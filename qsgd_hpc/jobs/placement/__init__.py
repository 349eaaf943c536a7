"""Placement of a job's ranks on cores and GPUs: planned, reported, checked, drawn."""
