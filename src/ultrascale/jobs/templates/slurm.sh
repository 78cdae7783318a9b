#!/bin/bash
@{head}
#
#   sbatch @{text_file}
#   squeue --me; tail -f @{log}
#   scancel JOBID            the ranks save and leave, if the cluster's KillWait lets them: scontrol show config | grep KillWait
#
# The job goes back into the queue by itself until the run is complete: when its time is over, when Slurm preempts it, when a
# node dies, and when the ranks fail (that only while each job brings a new checkpoint). It goes on from the newest checkpoint.

@{options}

set -uo pipefail

@{setup}

export run_folder=@{folder}
jobs_folder=$run_folder/jobs       # what nodes say
mkdir -p "$jobs_folder"
restart=${SLURM_RESTART_COUNT:-0}
echo "job $SLURM_JOB_ID, start $((restart + 1)), on $SLURM_JOB_NODELIST, $(date '+%F %T')"

@{exports}
# As many threads as the ranks of a node can have: else every rank starts one for each core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_ON_NODE > @{ranks} ? SLURM_CPUS_ON_NODE / @{ranks} : 1))}

# Addresses as Slurm itself has them, in the order of the nodes: a host's own name may lead to another network.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
addresses=""
for node in "${nodes[@@]}"; do
    addresses+="$(scontrol --oneliner show node "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') "
done
export addresses
# The ranks meet on the first node. The port is drawn from the job's number: two jobs of one node do not meet one another.
export meeting_place="${addresses%% *}:@{port}"

# Go back into the queue, if every earlier time that the ranks failed or ran out of time brought a new checkpoint.
requeue() {
    local newest
    newest=$(ls "$run_folder/checkpoints" 2>/dev/null | grep -v '^\.' | sort -V | tail -n 1)
    if [[ @{may_requeue} == false ]]; then
        echo "launch.slurm.requeue is off; the same sbatch goes on from ${newest:-the start}."
        exit 1
    fi
    if [[ -e $jobs_folder/requeued-$SLURM_JOB_ID && $newest == "$(<"$jobs_folder/requeued-$SLURM_JOB_ID")" ]]; then
        echo "no new checkpoint since the job was last queued again (newest: ${newest:-none}): it ends here."
        exit 1
    fi
    printf '%s' "$newest" >"$jobs_folder/requeued-$SLURM_JOB_ID"
    echo "back into the queue: $1 (newest checkpoint: ${newest:-none})"
    trap '' TERM  # with which Slurm ends this script now
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

# Before the start: the doctor on every node. One that fails, or says nothing for five minutes, is left out from now on. If all
# fail, it is not the nodes.
srun --ntasks-per-node=1 --cpu-bind=none@{container} bash -c '
    log=$run_folder/jobs/doctor-$SLURMD_NODENAME.txt
    timeout 300 python -m ultrascale doctor --folder "$run_folder"@{gpus_wanted} >"$log" 2>&1 && touch "$log.$SLURM_JOB_ID.$0"
' "$restart" || true
sick=()
for node in "${nodes[@@]}"; do
    if [[ -e $jobs_folder/doctor-$node.txt.$SLURM_JOB_ID.$restart ]]; then
        rm "$jobs_folder/doctor-$node.txt.$SLURM_JOB_ID.$restart"
    else
        sick+=("$node")
    fi
done
if ((${#sick[@@]} > 0)); then
    echo "the doctor stops ${sick[*]}: see $jobs_folder/doctor-NODE.txt"
    if ((${#sick[@@]} == ${#nodes[@@]} && ${#nodes[@@]} > 1)) || [[ @{may_requeue} == false ]]; then
        exit 1
    fi
    printf '%s\n' "${sick[@@]}" >>"$jobs_folder/left-out-$SLURM_JOB_ID"
    left_out=$(sort -u "$jobs_folder/left-out-$SLURM_JOB_ID" | paste -sd,)
    echo "back into the queue without $left_out"
    trap '' TERM  # with which Slurm ends this script now, and what it starts: the second line must still be done
    scontrol requeue "$SLURM_JOB_ID" && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$left_out"
    exit 0
fi

# The trainer knows when the job ends: it saves and leaves in time, by what its own steps and saves take.
ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)
leave_by=""
if ends=$(date -d "$ends" +%s 2>/dev/null); then
    leave_by="--leave-by $ends"
fi
export leave_by

# Should it not, Slurm's signal comes (--signal above) and is passed on: ranks and torchrun then save and leave.
why=""
trap 'why="its time is nearly over"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# scancel, preemption, scontrol requeue: Slurm has told the ranks itself, and queues the job again if it should.
trap 'why=ended' TERM

# One torchrun a node, which starts its ranks, sees them die, and starts them again up to @{restarts} times.
# --cpu-bind=none: torchrun has all cores of the node@{numa_reason}.
# --kill-on-bad-exit: a node without its torchrun holds all others up until they time out.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=1@{container} bash -c '
    own=($addresses)
    exec python -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node @{ranks} --max-restarts @{restarts} \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID.$0" --rdzv-endpoint "$meeting_place" \
        --rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "${own[$SLURM_NODEID]}"@{numa} \
        "$@@" $leave_by
' "$restart" @{train} &
step=$!
wait "$step"
while kill -0 "$step" 2>/dev/null; do  # a signal ends `wait`, not the step
    wait "$step"
done
wait "$step"
code=$?

state=$(@{on_one_node}python -m ultrascale.jobs.state "$run_folder")
echo "the ranks have left: exit code $code, $state${why:+, $why}"
if [[ $why == ended ]]; then
    # Somebody cancelled it, or Slurm queues it again itself. It does not if the time was over before anybody had left.
    [[ -n $leave_by && $(date +%s) -ge ${leave_by##* } ]] || exit "$code"
    why="its time was over"
fi
case $state in
    complete) exit 0 ;;
    stopped) requeue "${why:-the time is nearly over}" ;;
    *) requeue "the ranks failed" ;;
esac
