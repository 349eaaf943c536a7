#!/bin/bash
# Every rank runs this in front of its program: bash pin.sh PROGRAM ARGS...
# It gives the rank its place on a node of frontier, then becomes the program.
set -u
if (($# == 0)); then
    echo "usage: bash pin.sh PROGRAM ARGS..." >&2
    exit 2
fi

# Schedulers and launchers may send these to every rank; the job script has understood them.
trap '' USR1 USR2

# Not every launcher carries variables to other nodes.
export QSGD_JOB_DIR="${0%/*}"

# Threads of one rank.
export OMP_NUM_THREADS=8

exec "$@"
