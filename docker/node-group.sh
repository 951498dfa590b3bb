#!/usr/bin/env bash
# Several workers in one container: for Kubernetes' device plugin, which gives a GPU to one container only, while workers that exchange KV
# over NVLink must each see all GPUs of the node. In the image as damask-node-group.
# usage: damask-node-group ROLE:NAME:GPUS:CONFIG ...     such as prefill:prefill:0,1,2,3:/etc/damask/prefill.yaml
#   Each worker is a process of its own, restarted with growing waits when it dies while the others go on. Its name in the fleet is
#   POD_NAME-NAME. On SIGTERM the workers drain one after the other, in the order given: prefill first, since it sends to decode.
set -uo pipefail

readonly healthy_after_s=30 wait_max_s=10

# Keeps one worker running until SIGTERM. Exit code 2 is a refused configuration: a restart would not help.
supervise() {
    local role name gpus config child=0 draining=0 status started wait_s=1
    IFS=: read -r role name gpus config <<<"$1"
    trap 'draining=1; [ $child = 0 ] || kill -TERM $child 2>/dev/null' TERM
    export CUDA_VISIBLE_DEVICES=$gpus "DAMASK_${role^^}__NAME=${POD_NAME:-$HOSTNAME}-$name"
    until [ $draining = 1 ]; do
        started=$SECONDS
        damask --log-format "${LOG_FORMAT:-json}" "$role" --config "$config" &
        child=$!
        # SIGTERM may have come between the last look and this child.
        [ $draining = 0 ] || kill -TERM $child
        wait $child
        status=$?
        # A `wait` that a signal ended says 128 + 15; the worker is still draining then.
        while kill -0 $child 2>/dev/null; do wait $child; status=$?; done
        child=0
        [ $draining = 0 ] || return $status
        [ $status != 2 ] || return 2
        [ $((SECONDS - started)) -lt $healthy_after_s ] || wait_s=1
        echo "$name ended with status $status, restarted in $wait_s s" >&2
        sleep $wait_s & wait $!
        wait_s=$((wait_s * 2 < wait_max_s ? wait_s * 2 : wait_max_s))
    done
}

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# //p' "$0" >&2; exit 2; }
supervisors=()
drain() {
    local pid
    for pid in "${supervisors[@]}"; do
        kill -TERM "$pid" 2>/dev/null
        while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
    done
    exit 0
}
for worker in "$@"; do
    supervise "$worker" &
    supervisors+=($!)
done
trap drain TERM INT
# A supervisor ends by itself only if its worker's configuration was refused: then the container ends too.
wait -n
echo 'a worker cannot run: ending the others' >&2
trap - TERM
kill -TERM "${supervisors[@]}" 2>/dev/null
wait
exit 2
