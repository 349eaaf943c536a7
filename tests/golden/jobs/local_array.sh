#!/bin/bash
if [ $# = 0 ]; then
    QSGD_STARTED=$(date +%s)
    export QSGD_STARTED
    result=0 part='' ended=''
    pass() { again=yes; [ -z "$part" ] || kill -"$1" "$part" 2> /dev/null; }
    trap 'pass USR1' USR1 USR2
    trap 'ended=yes; pass TERM' TERM
    for QSGD_TASK in 0 1 2 3; do
        [ -z "$ended" ] || exit 143
        export QSGD_TASK
        "$BASH" "$0" "$QSGD_TASK" > /home/me/.qsgd-hpc/jobs/machine-7/output-"$QSGD_TASK".log 2>&1 &
        part=$!
        again=yes code=127
        while [ -n "$again" ]; do # a signal ends `wait`, not what it waits for
            again=
            wait "$part"
            now=$?
            [ "$now" = 127 ] || code=$now
        done
        case $code,$result in
            0,* | 85,[1-9]*) ;; # a task that stopped hides no failure
            *) result=$code ;;
        esac
    done
    exit "$result"
fi
QSGD_TASK=$1 # not inherited: a task may submit another array
shift # the files that the setup reads would see it
job_dir=/home/me/.qsgd-hpc/jobs/machine-7
task=${QSGD_TASK:?}
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
event start ", \"host\": \"$HOSTNAME\", \"scheduler_id\": \"\""
trap 'finish $?' EXIT
trap stop USR1 USR2
trap end TERM
if [ -e /home/me/.qsgd-hpc/jobs/machine-7/stop ]; then
    echo "not run: the array was asked to stop before this task started"
    exit 85
fi
cd -- /eagle/myproject/me/run || exit 1

export QSGD_JOB_DIR=$job_dir

trap '' USR1 USR2
/opt/venv/bin/qsgd-hpc run -np 8 --ranks-per-node 1 --prefix-output -- \
    /opt/venv/bin/python /eagle/myproject/me/run/train_resnet34.py --epochs 3 "${task_options[@]}" &
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
