#!/bin/bash
@{head}
#
#   bash @{text_file}
#
# Starts one torchrun on each host and waits for all. Ctrl-C here stops the run in order on every host: it saves, and the same
# command goes on. If a host is lost, all end; take it out of `hosts` (and write this script again if their number changes).
set -uo pipefail
hosts=(@{hosts})
first=${hosts[0]#*@@}
place=@{folder} # as the shell of a host reads it

# What each host runs, with its number and the first host's name behind it.
node_script=$(
    cat <<'END_OF_NODE_SCRIPT'
@{node_script}END_OF_NODE_SCRIPT
)

run_on() { ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$@@"; }

started=()
for number in "${!hosts[@@]}"; do
    run_on "${hosts[$number]}" "f=\$(mktemp) && cat >\$f && mkdir -p $place/jobs && echo \$\$ >$place/jobs/pid-$number &&
        exec bash \$f $number $first </dev/null" <<<"$node_script" > >(sed -u "s/^/${hosts[$number]}: /") 2>&1 &
    started+=($!)
done

# One that ends badly takes the others with it: they would wait for it until they time out. Each is told once: a second signal
# would end it without a save.
stopping=""
trap 'stopping=1' INT TERM
codes=() told=()
while ((${#codes[@@]} < ${#hosts[@@]})); do
    for number in "${!hosts[@@]}"; do
        [[ -n ${codes[$number]:-} ]] && continue
        if ! kill -0 "${started[$number]}" 2>/dev/null; then
            wait "${started[$number]}"
            codes[$number]=$?
            ((codes[number])) && stopping=1
        elif [[ -n $stopping && -z ${told[$number]:-} ]]; then
            run_on "${hosts[$number]}" "kill -TERM \$(cat $place/jobs/pid-$number)" 2>/dev/null </dev/null && told[$number]=1
        fi
    done
    sleep 1
done
state=$(run_on "${hosts[0]}" @{state_words} </dev/null)
echo "all have left: $state"
[[ $state == complete || $state == stopped ]] && exit 0
exit 1
