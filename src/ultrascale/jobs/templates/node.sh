set -uo pipefail
@{setup}
if ! python -m ultrascale doctor --folder @{folder}@{gpus_wanted} >/tmp/doctor.txt 2>&1; then
    cat /tmp/doctor.txt
    exit 1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > @{ranks} ? $(nproc) / @{ranks} : 1))}
python -m torch.distributed.run --nnodes @{nodes} --nproc-per-node @{ranks} --max-restarts @{restarts} \
    --rdzv-backend c10d --rdzv-id @{name} --rdzv-endpoint "@{first}:@{port}" \
    --rdzv-conf "is_host=$((@{number} == 0))"@{numa} \
    @{train} &
ranks=$!
trap 'kill -TERM $ranks' TERM INT
wait $ranks
while kill -0 $ranks 2>/dev/null; do wait $ranks; done  # a signal ends `wait`, not the ranks
wait $ranks
code=$?
# After a stop torchrun's exit code may be 0 although steps are left: exit code 0 is for a run that is complete. The folder's
# last line may come later here than where it was written.
for second in 1 2 3 4 5; do
    state=$(python -m ultrascale.jobs.state @{folder}) && exit 0
    [[ $code == 0 ]] || break
    sleep 2
done
echo "the ranks have left: exit code $code, $state"
[[ $state == stopped ]] && exit 75
exit 1
