#!/usr/bin/env bash
# The tour of qsgd-hpc on one machine: train, submit, measure. Results stay under demo/.
set -euo pipefail
cd "$(dirname "$0")/.."

epochs=3 bits=32,8,4
if [ "${1:-}" = --short ]; then epochs=1 bits=32,4; fi
# This machine, also where it is the login node of a cluster.
export QSGD_HOME="$PWD/demo" QSGD_SITE=local
script=tutorials/mnist_torch/train_mnist_hvd.py

say() { printf '\n\033[1m%s\033[0m\n' "== $*"; }
show() { printf '\033[2m$ %s\033[0m\n' "$*"; "$@"; }

say "1. Train on two ranks, gradients in 4 bits"
show qsgd-hpc run -np 2 --bits 4 python "$script" --epochs "$epochs"

say "2. The same script as a job: here, and what Polaris would be given"
show qsgd-hpc submit --nodes 2 --name mnist "$script" --epochs 1
job=$(qsgd-hpc list --json | python -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')
show qsgd-hpc logs -f --rank 0 "$job"
show qsgd-hpc status "$job"
show qsgd-hpc submit --site polaris --nodes 8 --walltime 30m --account myproject --dry-run \
  "$script" --epochs 3

say "3. How it scales: 1 and 2 nodes, 32 bits and fewer"
show qsgd-hpc scale --nodes 1,2 --mode strong --bits "$bits" \
  -o demo/study "$script" --epochs "$epochs"
