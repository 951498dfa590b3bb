#!/usr/bin/env bash
# Measures a whole deployment on the GPUs that are here, as clients see it over HTTP: time to the first token by prompt length, time a token and
# throughput by the number of clients, KV transfer, and what a kill of prefill and of decode under load costs. Builds nothing, and starts each
# layout as `damask up --layout` does. Prints tables; files go to --out.
# usage: deploy/whole-node.sh [--binary FILE] [--shape 20b|120b | --model DIR | --cpu] [--out DIR] [--quick] [--layout FILE]...
#   --binary FILE   default target/release/damask
#   --shape         random weights of that shape; default 120b
#   --cpu           gpt-oss-nano on the CPU, to try the script
#   --layout FILE   default: the layouts below for as many GPUs as there are (1, 2, 4 or 8)
#   --quick         fewer cases: about a minute a layout
# About 4 minutes a layout for 120b on H200s. Needs bash and python3 (its standard library).
set -euo pipefail
cd "$(dirname "$0")/.."

binary=target/release/damask serve=(--shape 120b) out=whole-node quick=false on_cpu=false layouts=()
while [ $# -gt 0 ]; do
    case $1 in
        --binary) binary=$2; shift ;;
        --shape | --model) serve=("$1" "$2"); shift ;;
        --cpu) on_cpu=true serve=(--backend cpu) ;;
        --out) out=$2; shift ;;
        --layout) layouts+=("$2"); shift ;;
        --quick) quick=true ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
mkdir -p "$out"
work=$(mktemp -d)
up_pid= seed=0
trap 'rm -rf "$work"' EXIT

# Ends the stack, if one runs; its exit code says whether every service ended well.
stop() {
    local pid=$up_pid
    up_pid=
    [ -n "$pid" ] || return 0
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid"
}

# Prints the layouts for a number of GPUs, one a line: NAME YAML.
layouts_for() {
    case $1 in
        0) echo 'cpu prefill: [{tp: 2}], decode: [{tp: 4}]' ;;
        1) echo 'p1-d1-shared prefill: [{tp: 1, devices: [0]}], decode: [{tp: 1, devices: [0]}]' ;;
        2 | 3)
            echo 'p1-d1 prefill: [{tp: 1, devices: [0]}], decode: [{tp: 1, devices: [1]}]'
            echo 'p2-d2-shared prefill: [{tp: 2, devices: [0, 1]}], decode: [{tp: 2, ep: 2, devices: [0, 1]}]'
            ;;
        4 | 5 | 6 | 7)
            echo 'p2-d2 prefill: [{tp: 2, devices: [0, 1]}], decode: [{tp: 2, ep: 2, devices: [2, 3]}]'
            echo '2p1-d2 prefill: [{tp: 1, devices: [0]}, {tp: 1, devices: [1]}], decode: [{tp: 2, ep: 2, devices: [2, 3]}]'
            ;;
        *)
            echo 'p4-d4 prefill: [{tp: 4, devices: [0, 1, 2, 3]}], decode: [{tp: 4, ep: 4, devices: [4, 5, 6, 7]}]'
            echo '2p2-d4 prefill: [{tp: 2, devices: [0, 1]}, {tp: 2, devices: [2, 3]}], decode: [{tp: 4, ep: 4, devices: [4, 5, 6, 7]}]'
            ;;
    esac
}

# field PATH...: of the ready file.
field() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2:]: value = value[key]
print(value)' "$work/ready.json" "$@"; }

start() {
    local deadline=$((SECONDS + 600))
    rm -f "$work/ready.json"
    "$binary" --log-level warn up --listen 127.0.0.1:0 --ready-file "$work/ready.json" "${serve[@]}" --layout "$1" >"$out/$2.log" 2>&1 &
    up_pid=$!
    local begin=$SECONDS
    until [ -e "$work/ready.json" ]; do
        kill -0 "$up_pid" 2>/dev/null || { echo "the stack ended:"; tail -n 20 "$out/$2.log"; up_pid=; return 1; }
        [ $SECONDS -lt $deadline ] || { echo "not ready in 600 s:"; tail -n 20 "$out/$2.log"; return 1; }
        sleep 0.2
    done
    echo "ready in $((SECONDS - begin)) s"
    url=http://$(field http)
}

get() { python3 -c 'import sys, urllib.request
sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())' "$1" 2>>"$work/errors"; }

# After `fresh`, which gives it seeds of its own: prefill keeps prompts, and one that came before would not be computed.
bench() { "$binary" bench --url "$url" --seed "$seed" "$@"; }
fresh() { seed=$((seed + 100000)); }

# sum NAME WORKER...: a metric over workers.
sum() {
    local name=$1 worker
    shift
    for worker in "$@"; do get "http://$(field admin "$worker")/metrics"; done \
        | awk -v name="$name" '$1 ~ "^" name "({|$)" { total += $2 } END { print total + 0 }'
}

workers() { python3 -c 'import json, sys
print(*[name for name in json.load(open(sys.argv[1]))["workers"] if name.startswith(sys.argv[2])])' "$work/ready.json" "$1"; }

# transfers FILE...: what workers' metrics say of the data path between devices, if there is one.
transfers() {
    python3 - "$@" <<'PY'
import re, sys
print("| worker | pair or stage | GB/s |\n|---|---|---|")
for file in sys.argv[1:]:
    worker, sums = re.sub(r".*-((?:prefill|decode)(?:-\d+)?)\.metrics", r"\1", file), {}
    for line in open(file):
        found = re.match(r"damask_transfer_(pair_bytes_per_second|stage_bytes|stage_seconds)(?:_total)?\{(.*)\} (\S+)", line)
        if found:
            what, labels, value = found[1], found[2].replace('"', ""), float(found[3])
            if what == "pair_bytes_per_second":
                print(f"| {worker} | {labels} | {value / 1e9:.0f} |")
            else:
                sums.setdefault(labels, {})[what] = value
    for labels, value in sorted(sums.items()):
        if value.get("stage_seconds"):
            print(f"| {worker} | {labels} | {value.get('stage_bytes', 0) / value['stage_seconds'] / 1e9:.0f} |")
PY
}

# kill_under_load WORKER NAME: requests run while a worker is killed; none may fail. How long until requests are served as before?
kill_under_load() {
    local worker=$1 begin pid
    fresh
    bench --concurrency 8 --input-tokens "$load_input" --output-tokens "$load_output" --rounds "$load_rounds" --json "$out/$2-kill-$worker.json" \
        >"$work/kill.md" 2>&1 &
    local bench_pid=$!
    sleep 2
    pid=$(field pids "$worker")
    kill -9 "$pid"
    begin=$(date +%s.%N)
    local deadline=$((SECONDS + 600))
    until [ "$(field pids "$worker" 2>/dev/null || echo "$pid")" != "$pid" ] \
        && get "http://$(field admin "$worker")/health/ready" >"$work/ready"; do
        [ $SECONDS -lt $deadline ] || { echo "$worker does not come back"; return 1; }
        sleep 0.05
    done
    local back
    back=$(python3 -c "import time; print(f'{time.time() - $begin:.1f}')")
    wait $bench_pid || { cat "$work/kill.md"; return 1; }
    local failed
    failed=$(python3 -c 'import json, sys
cases = json.load(open(sys.argv[1]))["cases"]
print(sum(case["failed"] for case in cases), "of", sum(case["requests"] for case in cases))' "$out/$2-kill-$worker.json")
    echo "| $worker killed with 8 clients | $failed failed | $back s until the new one is ready |"
}

measure() {
    local name=$1 file=$work/layout.yaml before after
    # `a: [..], b: [..]` as the body of a YAML mapping.
    echo "{$2}" >"$file"
    printf '\n## %s\n\n`%s`, %s\n\n' "$name" "$2" "${serve[*]}"
    start "$file" "$name"
    printf '\n### Time to the first token, one client\n\n'
    fresh
    bench --concurrency 1 --input-tokens "$ttft_inputs" --output-tokens 16 --rounds "$ttft_rounds" --json "$out/$name-ttft.json"
    printf '\n### Throughput\n\n'
    before=$(sum damask_transfer_bytes_total $(workers prefill))
    fresh
    bench --concurrency "$clients" --input-tokens "$load_input" --output-tokens "$load_output" --rounds "$load_rounds" --json "$out/$name-load.json"
    after=$(sum damask_transfer_bytes_total $(workers prefill))
    printf '\n### KV transfer\n\n'
    python3 -c "print(f'Sent during the last table: {($after - $before) / 1e9:.2f} GB.\n')"
    local worker files=()
    for worker in $(workers prefill) $(workers decode); do
        get "http://$(field admin "$worker")/metrics" >"$out/$name-$worker.metrics"
        files+=("$out/$name-$worker.metrics")
    done
    transfers "${files[@]}"
    printf '\n### Kills under load\n\n| what | requests | recovery |\n|---|---|---|\n'
    for worker in prefill decode; do kill_under_load $worker "$name"; done
    stop || { echo "the stack did not end well:"; tail -n 20 "$out/$name.log"; return 1; }
}

if $on_cpu; then
    ttft_inputs=64,256,1024 clients=1,4 load_input=128 load_output=64 load_rounds=3 ttft_rounds=2
elif $quick; then
    ttft_inputs=1024,8192 clients=1,8,32 load_input=1024 load_output=64 load_rounds=2 ttft_rounds=3
else
    ttft_inputs=1024,8192,32000 clients=1,2,4,8,16,32,64,128 load_input=1024 load_output=256 load_rounds=2 ttft_rounds=5
fi

gpus=0
$on_cpu || gpus=$(deploy/count-gpus.sh)
# The stack is this subshell's child: nobody else could end it.
{
    trap 'stop || true' EXIT
    echo "# Whole node: $gpus GPUs"
    $on_cpu || nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader | sed 's/^/    /'
    if [ ${#layouts[@]} -gt 0 ]; then
        for file in "${layouts[@]}"; do
            measure "$(basename "$file" .yaml)" "$(python3 -c 'import sys; print(sys.stdin.read().strip().strip("{}"))' <"$file")"
        done
    else
        layouts_for "$gpus" >"$work/layouts"
        # Standard input is the list: nothing below may read it.
        while read -r name layout; do measure "$name" "$layout" </dev/null; done <"$work/layouts"
    fi
} | tee "$out/report.md"
