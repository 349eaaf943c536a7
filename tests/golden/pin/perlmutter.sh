#!/bin/bash
# Every rank runs this in front of its program: bash pin.sh PROGRAM ARGS...
# It gives the rank its place on a node of perlmutter, then becomes the program.
set -u
if (($# == 0)); then
    echo "usage: bash pin.sh PROGRAM ARGS..." >&2
    exit 2
fi

# Schedulers and launchers may send these to every rank; the job script has understood them.
trap '' USR1 USR2

# Not every launcher carries variables to other nodes.
export QSGD_JOB_DIR="${0%/*}"

# Sets have the same order on all ranks: some scripts number words so.
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

# Prints the value of the first of these variables that holds a number.
pin_first() {
    local pin_name
    for pin_name; do
        if [[ ${!pin_name:-} =~ ^[0-9]+$ ]]; then
            echo $((10#${!pin_name}))
            return
        fi
    done
}

# The rank's number on its node and among all ranks, as the launchers tell them.
pin_local_rank=$(pin_first SLURM_LOCALID PALS_LOCAL_RANKID OMPI_COMM_WORLD_LOCAL_RANK \
    JSM_NAMESPACE_LOCAL_RANK MV2_COMM_WORLD_LOCAL_RANK MVP_COMM_WORLD_LOCAL_RANK \
    MPI_LOCALRANKID PMI_LOCAL_RANK PMIX_LOCAL_RANK FLUX_TASK_LOCAL_ID)
pin_rank=$(pin_first SLURM_PROCID PALS_RANKID OMPI_COMM_WORLD_RANK JSM_NAMESPACE_RANK \
    MV2_COMM_WORLD_RANK MVP_COMM_WORLD_RANK PMI_RANK PMIX_RANK FLUX_TASK_RANK)

# Every rank sees all GPUs of its node, in this order: the first belongs to local rank 0.
export CUDA_VISIBLE_DEVICES=3,2,1,0

# What torchrun would tell this rank. The job has noted where ranks meet.
if [[ -n $pin_rank && -n $pin_local_rank ]]; then
    export RANK=$pin_rank WORLD_SIZE=8 LOCAL_RANK=$pin_local_rank LOCAL_WORLD_SIZE=4
    pin_node=$(pin_first SLURM_NODEID)
    pin_node=${pin_node:-$((pin_rank / 4))}
    export GROUP_RANK=$pin_node NODE_RANK=$pin_node GROUP_WORLD_SIZE=2
    export ROLE_NAME=default ROLE_RANK=$pin_rank ROLE_WORLD_SIZE=8
    if [[ -r $QSGD_JOB_DIR/meeting ]]; then
        read -r pin_run pin_address pin_port < "$QSGD_JOB_DIR/meeting"
        export TORCHELASTIC_RUN_ID=$pin_run
        export MASTER_ADDR=${MASTER_ADDR:-$pin_address} MASTER_PORT=${MASTER_PORT:-$pin_port}
    fi
    export TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=False
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
fi

# Threads of one rank.
export OMP_NUM_THREADS=8

exec "$@"
