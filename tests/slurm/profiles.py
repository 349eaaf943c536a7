"""Site profiles for the Slurm of this folder: how its ranks are started."""

from __future__ import annotations

import sys

PROFILE = f"""
description: a Slurm on this machine
scheduler: slurm
python: {sys.executable}
node: {{cores: 8, gpus: 4}}
gpu: {{variable: CUDA_VISIBLE_DEVICES, order: [3, 2, 1, 0]}}
required: [account]
account_suffix: _g
defaults: {{account: myproject, walltime: "00:05:00"}}
queue_kind: qos
queues:
  debug: {{nodes: [1, 2], walltime: ["00:00:01", "00:30:00"]}}
  regular: {{nodes: [1, 4], walltime: ["00:00:01", "48:00:00"]}}
directives: ["--gpus-per-node={{gpus}}"]
"""
SRUN = """\
launcher:
  # Which --mpi the Python of a job needs is found out when the job is submitted.
  argv: [srun, -n, "{ranks}", "--ntasks-per-node={ranks_per_node}", --kill-on-bad-exit=1, "{label}"]
  label: [--label]
"""
MPIEXEC = """\
launcher:
  argv: ["{qsgd_hpc}", run, -np, "{ranks}", --ranks-per-node, "{ranks_per_node}", "{label}", --]
  label: [--prefix-output]
"""
