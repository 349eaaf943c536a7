"""The eight steps from a serial to a distributed training script: checks and conversion.

`reading` reads a script: its text and nodes (`tree`), and what its names mean (`names`).

`check` reports faults of a script that is distributed. It has a module for each kind of fault. They
ask `facts` what the script and the modules next to it (`helpers`) do, and in which order, and
`reach` from what a value may be computed.

`convert` converts a serial script. It has a module for each framework (`torch_script` with
`torch_data` and `torch_optimizer`, `keras_script`, ...). They share modules for the beginning of a
script (`opening`), its data (`loops`, `arrays`, `tf_data`), rates, metrics, outputs (`rank0`) and
files (`downloads`), and add edits to a `plan`; `words` has the steps and the texts.
"""
