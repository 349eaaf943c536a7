"""The eight steps from a serial to a distributed training script: checks and conversion.

`reading` reads a script, `check` reports faults of a script that is distributed, `convert`
converts a serial script; `convert.words` lists the steps.
"""
