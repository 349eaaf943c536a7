"""The eight steps from a serial to a distributed training script: checked, and taken for the user.

`steps` names them, `reading` reads a script, `check` says what is missing or wrong in a script that
is distributed, `convert` makes one from a script that is not.
"""
