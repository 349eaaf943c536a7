#!/bin/bash
cd -- /eagle/myproject/me/run || exit 1
export GREETING='say "hi" $USER
`id`'

/opt/venv/bin/qsgd-hpc run -np 8 --ranks-per-node 1 -- \
    /opt/venv/bin/python '/eagle/myproject/me/run/it'"'"'s a $(rm -rf ~) "scrípt".py' '' 'a b' '`id`' '$HOME' 'line
break' --nodes ''"'"'' '\' '日本'
