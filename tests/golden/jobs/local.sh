#!/bin/bash
cd -- /eagle/myproject/me/run || exit 1

/opt/venv/bin/qsgd-hpc run -np 8 --ranks-per-node 1 -- \
    /opt/venv/bin/python /eagle/myproject/me/run/train_resnet34.py --epochs 3
