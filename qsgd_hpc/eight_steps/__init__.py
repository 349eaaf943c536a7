"""The eight steps from a serial to a distributed training script: checks and conversion.

`steps` defines them, `reading` reads a script, `check` reports faults of a script that
is distributed, `convert` converts a serial script.
"""
