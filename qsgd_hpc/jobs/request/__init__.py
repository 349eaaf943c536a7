"""Requests before their submission: defaults, faults, remedies."""
