#!/bin/bash -l
#PBS -N train_resnet34
#PBS -A myproject
#PBS -q debug-scaling
#PBS -l select=8:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
#PBS -J 0-3%2
#PBS -r y
#PBS -j oe
#PBS -k doe

job_dir=/home/me/.qsgd-hpc/jobs/machine-7
task=${PBS_ARRAY_INDEX:?}
job_dir=$job_dir/task-$task
case $task in
    0) task_options=(--lr 0.1 --tag 'a b') ;;
    1) task_options=(--lr 0.1 --tag '$(id)') ;;
    2) task_options=(--lr 0.2 --tag 'a b') ;;
    3) task_options=(--lr 0.2 --tag '$(id)') ;;
esac
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
if [ -e /home/me/.qsgd-hpc/jobs/machine-7/stop ]; then
    echo "not run: the array was asked to stop before this task started"
    exit 85
fi
echo "$(($(date +%s) + 1620))" > "$job_dir/stop_at"
cd -- /eagle/myproject/me/run || exit 1

module use /soft/modulefiles
module load conda
conda activate base
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128
export TMPDIR=/tmp
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export GLOO_SOCKET_IFNAME=hsn0
export LD_LIBRARY_PATH=/soft/libraries/hwloc/lib:/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export QSGD_JOB_DIR=$job_dir

# Where ranks of torch.distributed meet: on the first node, at a port that is held until this ends.
exec {meeting}< <(exec python -I -S hold_port.py 2> /dev/null)
read -r -t 60 -u "$meeting" port || port=$((20000 + $$ % 12000))
read -r address _ < <(echo "$(hostname -s).hsn.cm.polaris.alcf.anl.gov")
printf '%s %s %s\n' qsgd-0 "${address:-$HOSTNAME}" "$port" > "$job_dir/meeting"

cat > "$job_dir/pin.sh" << 'END_OF_PIN_SH' || exit 1
#!/bin/bash
# Every rank runs this in front of its program: bash pin.sh PROGRAM ARGS...
# It gives the rank its place on a node of polaris, then becomes the program.
set -u
if (($# == 0)); then
    echo "usage: bash pin.sh PROGRAM ARGS..." >&2
    exit 2
fi

# Schedulers and launchers may send these to every rank; the job script has understood them.
trap '' USR1 USR2

# Not every launcher carries variables to other nodes.
export QSGD_JOB_DIR="${0%/*}"
export TMPDIR=/tmp
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export GLOO_SOCKET_IFNAME=hsn0
export QSGD_RANKS=32

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

# Every rank sees all GPUs of its node, in this order: the first belongs to local rank 0.
export CUDA_VISIBLE_DEVICES=3,2,1,0

# What torchrun would tell this rank. The job has noted where ranks meet.
if [[ -n $pin_rank && -n $pin_local_rank ]]; then
    export RANK=$pin_rank WORLD_SIZE=32 LOCAL_RANK=$pin_local_rank LOCAL_WORLD_SIZE=4
    pin_node=$(pin_first PALS_NODEID)
    pin_node=${pin_node:-$((pin_rank / 4))}
    export GROUP_RANK=$pin_node NODE_RANK=$pin_node GROUP_WORLD_SIZE=8
    export ROLE_NAME=default ROLE_RANK=$pin_rank ROLE_WORLD_SIZE=32
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
END_OF_PIN_SH

trap '' USR1 USR2
mpiexec -n 32 --ppn 4 --depth=8 --cpu-bind depth \
    bash "$job_dir/pin.sh" \
    python /eagle/myproject/me/run/train_resnet34.py --epochs 3 "${task_options[@]}" &
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
