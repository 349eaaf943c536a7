#!/bin/bash
# Every rank runs this in front of its program: bash pin.sh PROGRAM ARGS...
# It gives the rank its place on a node of twelve_tiles, then becomes the program.
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
pin_local_rank=$(pin_first MY_LOCAL_RANK PALS_LOCAL_RANKID OMPI_COMM_WORLD_LOCAL_RANK \
    JSM_NAMESPACE_LOCAL_RANK MV2_COMM_WORLD_LOCAL_RANK MVP_COMM_WORLD_LOCAL_RANK \
    MPI_LOCALRANKID PMI_LOCAL_RANK PMIX_LOCAL_RANK FLUX_TASK_LOCAL_ID \
    SLURM_LOCALID)
pin_rank=$(pin_first PALS_RANKID OMPI_COMM_WORLD_RANK JSM_NAMESPACE_RANK MV2_COMM_WORLD_RANK \
    MVP_COMM_WORLD_RANK PMI_RANK PMIX_RANK FLUX_TASK_RANK SLURM_PROCID)
if [[ -z $pin_local_rank ]]; then
    if ((${pin_rank:-0} == 0)); then # one message, not one from each rank
        echo "pin.sh on ${HOSTNAME:-a node}: 12 ranks on each node, but no variable tells" \
            "which of them this is." 'Find one with: mpiexec -n 2 env | grep -i rank. Add it to the profile, sites/twelve_tiles.yaml in QSGD_HOME: local_rank_variables: [NAME]' >&2
    fi
    exit 1
fi

# Every rank sees its own GPU alone. Ranks beyond the list begin again at its start.
pin_gpus=(0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 4.0 4.1 5.0 5.1)
export ZE_AFFINITY_MASK="${pin_gpus[pin_local_rank % 12]}"

# The network card beside the rank's GPU.
pin_nics=(cxi0 cxi0 cxi1 cxi1 cxi2 cxi2 cxi4 cxi4 cxi5 cxi5 cxi6 cxi6)
export FI_CXI_DEVICE_NAME="${pin_nics[pin_local_rank % 12]}"

# What torchrun would tell this rank. The job has noted where ranks meet.
if [[ -n $pin_rank && -n $pin_local_rank ]]; then
    export RANK=$pin_rank WORLD_SIZE=24 LOCAL_RANK=$pin_local_rank LOCAL_WORLD_SIZE=12
    pin_node=$(pin_first PALS_NODEID)
    pin_node=${pin_node:-$((pin_rank / 12))}
    export GROUP_RANK=$pin_node NODE_RANK=$pin_node GROUP_WORLD_SIZE=2
    export ROLE_NAME=default ROLE_RANK=$pin_rank ROLE_WORLD_SIZE=24
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

# The cores of each local rank. Ranks beyond the list begin again at its start.
pin_cpus=(4-7 8-11 12-15 16-19 20-23 24-27 56-59 60-63 64-67 68-71 72-75 76-79)
pin_list=${pin_cpus[pin_local_rank % 12]}
if ! pin_said=$(taskset -pc "$pin_list" $$ 2>&1) && ((${pin_rank:-$pin_local_rank} == 0)); then
    echo "pin.sh: warning: ranks are not bound to cores and may be slow. Cores $pin_list of" \
        "rank 0 on ${HOSTNAME:-this node}: $pin_said" >&2
fi

exec "$@"
