#!/usr/bin/env bash
# node-group.sh with a stand-in for damask: names and GPUs, restart of a dead worker, drain in order, a refused configuration. About 6 s.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/damask" <<'STAND_IN'
#!/usr/bin/env bash
# damask --log-format json ROLE --config FILE; FILE says `refused`, or nothing.
role=$3 config=$5
echo "start $role on $CUDA_VISIBLE_DEVICES as $DAMASK_PREFILL__NAME$DAMASK_DECODE__NAME"
echo $$ >"$config.pid"
grep -q refused "$config" && { sleep 0.4; exit 2; }
trap 'sleep 0.3; echo "end $role"; exit 0' TERM
while :; do sleep 0.1 & wait $!; done
STAND_IN
chmod +x "$folder/damask"
: >"$folder/p.yaml"
: >"$folder/d.yaml"

start() {
    PATH=$folder:$PATH POD_NAME=pod-0 "$(dirname "$0")/node-group.sh" "prefill:prefill:0,1:$folder/p.yaml" "decode:decode:2,3:$folder/d.yaml" \
        >"$folder/log" 2>&1 &
    group=$!
    sleep 0.7
}

expect() { diff <(grep -v 'Killed' "$folder/log" | sort) <(sort) || { echo "$1"; exit 1; }; }

start
kill -9 "$(cat "$folder/d.yaml.pid")"
sleep 2
kill -TERM $group
wait $group || { echo "status $? after a drain"; exit 1; }
[ "$(grep ^end "$folder/log")" = $'end prefill\nend decode' ] || { echo 'not drained in order'; cat "$folder/log"; exit 1; }
expect 'a crash and a drain' <<'LOG'
start prefill on 0,1 as pod-0-prefill
start decode on 2,3 as pod-0-decode
decode ended with status 137, restarted in 1 s
start decode on 2,3 as pod-0-decode
end prefill
end decode
LOG

echo refused >"$folder/d.yaml"
start
status=0
wait $group || status=$?
[ $status = 2 ] || { echo "status $status for a refused configuration"; exit 1; }
expect 'a refused configuration' <<'LOG'
start prefill on 0,1 as pod-0-prefill
start decode on 2,3 as pod-0-decode
a worker cannot run: ending the others
end prefill
LOG
