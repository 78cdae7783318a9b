#!/bin/bash
@{head}
#
@{usage}
#
# Every node must see this folder under the same path. torchrun starts the ranks, sees them die, and starts them again up to
# @{restarts} times. Ctrl-C or SIGTERM on one node ends that node; the others find out, and the same commands go on.
set -uo pipefail
@{arguments}
cd @{here} || exit 1

@{setup}

@{exports}
# Without it torchrun does not tell a node that was started anew where the others meet.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > @{ranks} ? $(nproc) / @{ranks} : 1))}

python -m ultrascale doctor --folder @{folder}@{gpus_wanted} >/tmp/doctor-$$.txt 2>&1 || {
    echo "the doctor stops $(hostname):"
    cat /tmp/doctor-$$.txt
    exit 1
}
rm -f /tmp/doctor-$$.txt
exec python -m torch.distributed.run --nnodes @{nodes} --nproc-per-node @{ranks} --max-restarts @{restarts} \
    --rdzv-backend c10d --rdzv-id @{name} --rdzv-endpoint "$first:@{port}" \
    --rdzv-conf "is_host=$((number == 0))"@{numa} \
    @{train}
