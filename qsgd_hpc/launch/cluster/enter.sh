#!/bin/sh
# mpiexec starts this instead of ssh; its option accepts a program without arguments only.
exec "$QSGD_CLUSTER_PYTHON" -I "${0%enter.sh}namespaces.py" "$@"
