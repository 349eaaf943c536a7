#!/usr/bin/env bash
# The tour of qsgd-hpc on one machine: train, submit, measure. Results stay under demo/.
set -euo pipefail
cd "$(dirname "$0")/.."

epochs=3 repeats=1 bits=32,8,4 nodes=1,2 speeds=100mbit,10gbit study=demo/study digits=''
batch=128 job=(--epochs 1)
if [ "${1:-}" = --short ]; then
  epochs=1 bits=32,4 nodes=2 speeds=100mbit study=demo/short
  batch=256 job=(--digits)  # half the messages an epoch; a job of seconds
fi
# This machine, also where it is the login node of a cluster.
export QSGD_HOME="$PWD/demo" QSGD_SITE=local
script=tutorials/mnist_torch/train_mnist_hvd.py

say() { printf '\n\033[1m%s\033[0m\n' "== $*"; }
show() { printf '\033[2m$ %s\033[0m\n' "$*"; "$@"; }

say "1. Train on two ranks, gradients in 4 bits"
mkdir -p demo
show qsgd-hpc run -np 2 --bits 4 python "$script" --epochs "$epochs" | tee demo/first.log
# Without MNIST the script takes scikit-learn's digits, whose epochs take a second or less.
if grep -q '^digits:' demo/first.log; then
  digits=yes epochs=3
  if [ "${1:-}" != --short ]; then nodes=2 repeats=3; fi
fi

say "2. The same script as a job: here, and what Polaris would be given"
show qsgd-hpc submit --nodes 2 --name mnist "$script" "${job[@]}"
id=$(qsgd-hpc list --json | python -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')
show qsgd-hpc logs -f --rank 0 "$id"
show qsgd-hpc status "$id"
show qsgd-hpc submit --site polaris --nodes 8 --walltime 30m --account myproject --dry-run \
  "$script" --epochs 3

# Where compressing pays, and where it does not.
networks=(--network "$speeds")
say "3. Does compressing help? Two hosts of their own on this machine, joined at ${speeds//,/ and at }"
if ! missing=$(qsgd-hpc run -np 2 --network 100mbit --dry-run true 2>&1 > /dev/null); then
  printf '%s\n' "$missing" "So the study goes through shared memory, where bytes cost little."
  networks=() nodes=1,2
fi
show qsgd-hpc scale --nodes "$nodes" "${networks[@]}" --mode strong --bits "$bits" --target 0.98 \
  --batch-size "$batch" --epochs "$epochs" --repeats "$repeats" -o "$study" "$script"
printf 'With charts: %s\n' "file://$PWD/$study/report.html"

say "Next"
if [ "$repeats" = 1 ]; then
  printf 'To tell which is faster: the last command with --repeats 3 -o %s\n' "$study-repeated"
fi
if [ "$digits" ]; then
  printf '%s\n' "scikit-learn's digits stood in for MNIST: too few to compare accuracies, and too quick to time well." \
    "With MNIST's four files in FOLDER: QSGD_DATA=FOLDER make demo"
fi
printf 'For your own script: qsgd-hpc scale --nodes 1,2 --bits 32,8,4 --repeats 3 train.py\n'
