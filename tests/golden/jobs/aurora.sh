#!/bin/bash -l
#PBS -N train_resnet34
#PBS -A myproject
#PBS -q debug-scaling
#PBS -l select=8
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:flare
#PBS -r n
#PBS -j oe
#PBS -k doe

job_dir=/home/me/.qsgd-hpc/jobs/machine-7
mkdir -p -- "$job_dir" || exit 1
launcher='' terminated=''
# Those of the job whose script has submitted this one.
unset QSGD_ATTEMPT
case ${TORCHELASTIC_RUN_ID-} in qsgd-*) unset MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID ;; esac
event() { printf '{"at": %s, "event": "%s"%s}\n' "$(date +%s)" "$1" "${2-}" >> "$job_dir/events.jsonl"; }
finish() {
    [ -n "$terminated" ] || printf '%s\n' "$1" > "$job_dir/outcome"
    event end ", \"exit_code\": $1"
}
stop() { : > "$job_dir/stop"; event stop; again=yes; }
end() {
    terminated=yes again=yes
    event terminate
    [ -n "$launcher" ] || exit 143
    kill -TERM "$launcher" 2> /dev/null
}
# Of an earlier run. The first keeps `stop`: schedulers say RUNNING before this script starts.
[ ! -s "$job_dir/events.jsonl" ] || rm -f -- "$job_dir"/{stop,resubmit,outcome,meeting}
event start ", \"host\": \"$HOSTNAME\", \"scheduler_id\": \"${PBS_JOBID-}\""
trap 'finish $?' EXIT
trap stop USR1 USR2
trap end TERM
echo "$(($(date +%s) + 1620))" > "$job_dir/stop_at"
cd -- /eagle/myproject/me/run || exit 1

module load frameworks
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128
export OMP_NUM_THREADS=4
export TMPDIR=/tmp
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
export FI_MR_CACHE_MONITOR=userfaultfd
export GLOO_SOCKET_IFNAME=hsn0
export QSGD_JOB_DIR=$job_dir

# Where ranks of torch.distributed meet: on the first node, at a port that is held until this ends.
exec {meeting}< <(exec python -I -S hold_port.py 2> /dev/null)
read -r -t 60 -u "$meeting" port || port=$((20000 + $$ % 12000))
read -r address _ < <(echo "$(hostname -s).hsn.cm.aurora.alcf.anl.gov")
printf '%s %s %s\n' qsgd-0 "${address:-$HOSTNAME}" "$port" > "$job_dir/meeting"

cat > "$job_dir/pin.sh" << 'END_OF_PIN_SH' || exit 1
#!/bin/bash
# Every rank runs this in front of its program: bash pin.sh PROGRAM ARGS...
# It gives the rank its place on a node of aurora, then becomes the program.
set -u
if (($# == 0)); then
    echo "usage: bash pin.sh PROGRAM ARGS..." >&2
    exit 2
fi

# Schedulers and launchers may send these to every rank; the job script has understood them.
trap '' USR1 USR2

# Not every launcher carries variables to other nodes.
export QSGD_JOB_DIR="${0%/*}"
export OMP_NUM_THREADS=4
export TMPDIR=/tmp
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
export FI_MR_CACHE_MONITOR=userfaultfd
export GLOO_SOCKET_IFNAME=hsn0
export QSGD_RANKS=96

# Sets have the same order on all ranks: some scripts number words so.
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

# Looks after scripts of torch.distributed: they compress as QSGD_BITS says, and none trains alone unseen.
export PYTHONPATH=start_up${PYTHONPATH:+:$PYTHONPATH}

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
pin_local_rank=$(pin_first PALS_LOCAL_RANKID OMPI_COMM_WORLD_LOCAL_RANK JSM_NAMESPACE_LOCAL_RANK \
    MV2_COMM_WORLD_LOCAL_RANK MVP_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID \
    PMI_LOCAL_RANK PMIX_LOCAL_RANK FLUX_TASK_LOCAL_ID SLURM_LOCALID)
pin_rank=$(pin_first PALS_RANKID OMPI_COMM_WORLD_RANK JSM_NAMESPACE_RANK MV2_COMM_WORLD_RANK \
    MVP_COMM_WORLD_RANK PMI_RANK PMIX_RANK FLUX_TASK_RANK SLURM_PROCID)

# Every rank sees all GPUs of its node, in the machine's own order.
unset ZE_AFFINITY_MASK

# What torchrun would tell this rank. The job has noted where ranks meet.
if [[ -n $pin_rank && -n $pin_local_rank ]]; then
    export RANK=$pin_rank WORLD_SIZE=96 LOCAL_RANK=$pin_local_rank LOCAL_WORLD_SIZE=12
    pin_node=$(pin_first PALS_NODEID)
    pin_node=${pin_node:-$((pin_rank / 12))}
    export GROUP_RANK=$pin_node NODE_RANK=$pin_node GROUP_WORLD_SIZE=8
    export ROLE_NAME=default ROLE_RANK=$pin_rank ROLE_WORLD_SIZE=96
    if [[ -r $QSGD_JOB_DIR/meeting ]]; then
        read -r pin_run pin_address pin_port < "$QSGD_JOB_DIR/meeting"
        export TORCHELASTIC_RUN_ID=$pin_run
        export MASTER_ADDR=${MASTER_ADDR:-$pin_address} MASTER_PORT=${MASTER_PORT:-$pin_port}
    fi
    export TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=False
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
fi

exec "$@"
END_OF_PIN_SH

trap '' USR1 USR2
mpiexec -n 96 -ppn 12 --cpu-bind=verbose,list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79 \
    bash "$job_dir/pin.sh" \
    python /eagle/myproject/me/run/train_resnet34.py --epochs 3 &
launcher=$!
trap stop USR1 USR2
again=yes code=127
while [ -n "$again" ]; do # a signal ends `wait`, not what it waits for
    again=
    wait "$launcher"
    now=$?
    [ "$now" = 127 ] || code=$now
done
[ ! -e "$job_dir/resubmit" ] || code=85 # a launcher may have reported something else
exit "$code"
