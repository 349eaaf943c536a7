#!/bin/bash -l
#PBS -N train_resnet34
#PBS -A myproject
#PBS -q debug-scaling
#PBS -l select=8:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
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
export QSGD_BITS=4
export LD_LIBRARY_PATH=/soft/libraries/hwloc/lib:/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export QSGD_JOB_DIR=$job_dir

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
export QSGD_BITS=4
export QSGD_RANKS=32

# Sets have the same order on all ranks: some scripts number words so.
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

# Every rank sees all GPUs of its node, in this order: the first belongs to local rank 0.
export CUDA_VISIBLE_DEVICES=3,2,1,0

# Threads of one rank.
export OMP_NUM_THREADS=8

exec "$@"
END_OF_PIN_SH

trap '' USR1 USR2
mpiexec -n 32 --ppn 4 --depth=8 --cpu-bind depth \
    bash "$job_dir/pin.sh" \
    python -m qsgd_hpc.horovod_compat /eagle/myproject/me/run/train_resnet34.py --epochs 3 &
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
