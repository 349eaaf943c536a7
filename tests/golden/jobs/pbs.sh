#!/bin/bash
#PBS -N train_resnet34
#PBS -l select=8:mpiprocs=4
#PBS -l place=scatter:excl
#PBS -r n
#PBS -j oe

job_dir=/home/me/.qsgd-hpc/jobs/machine-7
mkdir -p -- "$job_dir" || exit 1
event() { printf '{"at": %s, "event": "%s"%s}\n' "$(date +%s)" "$1" "${2-}" >> "$job_dir/events.jsonl"; }
finish() {
    [ -n "${terminated-}" ] || printf '%s\n' "$1" > "$job_dir/outcome"
    event end ", \"exit_code\": $1"
}
rm -f -- "$job_dir/stop" "$job_dir/resubmit" "$job_dir/outcome"
event start ", \"host\": \"$HOSTNAME\", \"scheduler_id\": \"${PBS_JOBID-}\""
trap 'finish $?' EXIT
cd -- /eagle/myproject/me/run || exit 1

export QSGD_JOB_DIR=$job_dir

cat > "$job_dir/pin.sh" << 'END_OF_PIN_SH' || exit 1
#!/bin/bash
# Every rank runs this in front of its program: bash pin.sh PROGRAM ARGS...
# It gives the rank its place on a node of pbs, then becomes the program.
set -u
if (($# == 0)); then
    echo "usage: bash pin.sh PROGRAM ARGS..." >&2
    exit 2
fi

# Not every launcher carries variables to other nodes.
export QSGD_JOB_DIR="${0%/*}"
export QSGD_RANKS=32

exec "$@"
END_OF_PIN_SH

stop() { : > "$job_dir/stop"; event stop; again=yes; }
end() { terminated=yes; event terminate; kill -TERM "$launcher" 2> /dev/null; again=yes; }
trap stop USR1 USR2
trap end TERM
mpiexec -n 32 \
    bash "$job_dir/pin.sh" \
    /opt/venv/bin/python /eagle/myproject/me/run/train_resnet34.py --epochs 3 &
launcher=$! again=yes code=127
while [ -n "$again" ]; do # a signal ends `wait`, not what it waits for
    again=
    wait "$launcher"
    now=$?
    [ "$now" = 127 ] || code=$now
done
[ ! -e "$job_dir/resubmit" ] || code=85 # a launcher may have reported something else
exit "$code"
