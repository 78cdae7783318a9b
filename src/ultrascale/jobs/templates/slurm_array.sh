#!/bin/bash
@{head}
#
#   sbatch @{text_file}
#   @{results}
#
# Each task of the array measures one cell and leaves its result in the cell's folder. A task that is preempted or loses a node is
# queued again and begins its cell anew; the same sbatch passes over what is measured.

@{options}

set -uo pipefail

@{setup}

@{exports}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_ON_NODE > @{ranks} ? SLURM_CPUS_ON_NODE / @{ranks} : 1))}

# Line by line the folders of the cells, each with its run.toml.
cell=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" @{cells})
if [[ -s $cell/speed.json ]]; then
    echo "$cell is measured"
    exit 0
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
addresses=""
for node in "${nodes[@@]}"; do
    addresses+="$(scontrol --oneliner show node "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') "
done
export addresses cell
export meeting_place="${addresses%% *}:@{port}"

srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=1@{container} bash -c '
    own=($addresses)
    exec python -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node @{ranks} --max-restarts 0 \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID.$0" --rdzv-endpoint "$meeting_place" \
        --rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "${own[$SLURM_NODEID]}"@{numa} \
        -m ultrascale measure speed "$cell/run.toml" --out "$cell/speed.json" --warm @{warm} --steps @{steps}
' "${SLURM_RESTART_COUNT:-0}" >"$cell/log.txt" 2>&1
code=$?
[[ -s $cell/speed.json ]] || echo "$cell: not measured, exit code $code: see $cell/log.txt"
exit "$code"
