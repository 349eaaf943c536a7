#!/bin/bash
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
event start ", \"host\": \"$HOSTNAME\", \"scheduler_id\": \"\""
trap 'finish $?' EXIT
trap stop USR1 USR2
trap end TERM
cd -- /eagle/myproject/me/run || exit 1

export GREETING='say "hi" $USER
`id`'
export QSGD_JOB_DIR=$job_dir

trap '' USR1 USR2
/opt/venv/bin/qsgd-hpc run -np 8 --ranks-per-node 1 --prefix-output -- \
    /opt/venv/bin/python '/eagle/myproject/me/run/it'"'"'s a $(rm -rf ~) "scrípt".py' '' 'a b' '`id`' '$HOME' 'line
break' --nodes ''"'"'' '\' '日本' &
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
