#!/bin/sh
# What mpiexec starts in place of ssh. It takes a program without arguments, so: this file.
exec "$QSGD_CLUSTER_PYTHON" -I "${0%.sh}.py" "$@"
