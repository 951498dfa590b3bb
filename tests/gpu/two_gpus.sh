#!/usr/bin/env bash
# Runs what a machine with two GPUs can show of Damask, prints the tables and a line PASS or FAIL for each gate, and exits with 1 for a FAIL.
#
#   tests/gpu/two_gpus.sh build DIR              here: builds the binaries, strips them, and puts them into DIR
#   tests/gpu/two_gpus.sh run DIR OUT [PART..]   there: runs parts, all by default, from a checkout; builds nothing. OUT receives logs and tables
#
# On one card, whose ranks then share it: DAMASK_TEST_GPUS=1, and the parts doctor contract kernels engine chat schemes by name.
# Needs bash, python3 (its standard library) and NCCL where the loader finds it. Parts, with minutes on two H200:
#   doctor     0.5  damask doctor
#   contract   1    the transport contract over every transport, NCCL included
#   kernels    2    tests of the kernels on one card and of the driver's wrappers on the other, then of kernels and communicators over both
#   engine     2    tests of the CUDA engine, in every layout of up to four ranks
#   chat       6    gpt-oss-nano's chat cases by four services in every layout, over auto and nccl, and with prompts reused
#   schemes    1.5  the chat cases in each scheme of weights
#   kills      4    20 kills over the phases of a transfer, by ipc on one card and by nccl on two, at the same time
#   path       0.5  KV between idle cards: tail and rate
#   load       1.5  KV beside a decoding batch: tail, decode step and first token
#   all-reduce 0.5  sums between the cards, beside NCCL's
#   sweep      3    steps of 20b and 120b with TP1 (a shape a card), TP2, EP2 TP2 and DP2 EP2
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PARTS=(doctor contract kernels engine chat schemes kills path load all-reduce sweep)

build() { python3 "$here/binaries.py" "$1" damask driver nccl kernels engine contract bench device_path; }

# gate OK WHAT: OK is an exit code.
gate() {
    if [ "$1" = 0 ]; then echo "PASS $2"; else echo "FAIL $2"; fi
}

# suite NAME COMMAND..: a binary of tests; its last line, and what failed. One that ran none has failed.
suite() {
    local name=$1 code=0 result
    shift
    "$@" >"$out/$name.log" 2>&1 || code=$?
    grep -E '^test .*FAILED|panicked at' "$out/$name.log" | head -n 20
    result=$(grep -E '^test result' "$out/$name.log" | tail -n 1)
    grep -qE ' [1-9][0-9]* passed' <<<"$result" || [ "$code" != 0 ] || code=1
    gate "$code" "$name: ${result:-no result, exit code $code}"
}

doctor() {
    local code=0
    "$bin/damask" doctor --gpus "$DAMASK_TEST_GPUS" 2>&1 || code=$?
    gate "$code" "doctor"
}

contract() {
    suite contract "$bin/contract" --test-threads 8
}

kernels() {
    if [ "$DAMASK_TEST_GPUS" = 1 ]; then
        suite kernels "$bin/kernels" --test-threads 4 --skip peers --skip groups
        suite kernels-together "$bin/kernels" peers groups --test-threads 1
        suite driver "$bin/driver" --test-threads 1
        return
    fi
    DAMASK_TEST_GPUS=1 CUDA_VISIBLE_DEVICES=$(card 0) suite kernels "$bin/kernels" --test-threads 4 --skip peers --skip groups &
    DAMASK_TEST_GPUS=1 CUDA_VISIBLE_DEVICES=$(card 1) suite driver "$bin/driver" --test-threads 1 &
    wait
    suite kernels-two-cards "$bin/kernels" peers groups --test-threads 1
    suite driver-two-cards "$bin/driver" links --test-threads 1
    suite nccl "$bin/nccl" --test-threads 1
}

engine() { suite engine "$bin/engine" --test-threads 1; }

chat() {
    python3 "$here/kv_transfer.py" "$bin/damask" chat
    local code=$?
    python3 "$here/kv_transfer.py" "$bin/damask" --reuse --layout tp1-tp1-one-card,tp2-tp2,tp2-ep4tp4 --transport auto chat && return $code
}

# Chat cases in each scheme of weights, given as experts' and the rest's; bf16 experts over two ranks too.
schemes() {
    local scheme layouts
    for scheme in mxfp4/bf16 fp8/bf16 fp8/fp8 mxfp4/fp8 bf16/bf16; do
        layouts=tp1-tp1-one-card
        [ $scheme != bf16/bf16 ] || layouts+=,tp2-tp2
        export DAMASK_{PREFILL,DECODE}__WEIGHTS__EXPERTS=${scheme%/*} DAMASK_{PREFILL,DECODE}__WEIGHTS__DENSE=${scheme#*/}
        python3 "$here/kv_transfer.py" "$bin/damask" --layout $layouts --transport auto chat | sed "s,^\(PASS\|FAIL\) chat.*,& $scheme,"
        gate "${PIPESTATUS[0]}" "schemes: $scheme"
    done
}

# kill_over LAYOUT TRANSPORT: its own lines, and one that says how it ended.
kill_over() {
    python3 "$here/kv_transfer.py" "$bin/damask" --layout "$1" --transport "$2" kill >"$out/kills-$2.md" 2>&1
    gate $? "kills over $2: the script's end" >>"$out/kills-$2.md"
}

kills() {
    kill_over tp1-tp1-one-card ipc &
    kill_over tp1-tp1 nccl &
    wait
    cat "$out/kills-ipc.md" "$out/kills-nccl.md"
}

path() {
    for way in 'ipc 0 1' 'ipc 0 0' 'nccl 0 1'; do
        # shellcheck disable=SC2086
        "$bin/device_path" $way context=131072 2>&1 | tee "$out/path-${way// /-}.md"
        gate "${PIPESTATUS[0]}" "path $way"
    done
    python3 "$here/gates.py" path "$out/path-ipc-0-1.md"
}

load() { python3 "$here/kv_transfer.py" "$bin/damask" --layout tp1-tp1 --transport ipc load; }

all-reduce() {
    "$bin/bench" --bench all_reduce 2>&1 | tee "$out/all-reduce.md"
    gate "${PIPESTATUS[0]}" "the bench all_reduce"
    python3 "$here/gates.py" all-reduce "$out/all-reduce.md"
}

# sweep_one SHAPE TP EP DP [CARD]
sweep_one() {
    local name=$1-tp$2-ep$3-dp$4 prompts=1024,8192
    # Prefill has no attention groups.
    [ "$4" = 1 ] || prompts=none
    [ -z "${5:-}" ] || export CUDA_VISIBLE_DEVICES=$5
    "$bin/damask" sweep --shape "$1" --tp "$2" --ep "$3" --dp "$4" --prompts $prompts --batches 1,8,32,128 --contexts 1024 \
        --out "$out/sweep" --name "$name" >"$out/sweep-$name.log" 2>&1
    gate $? "sweep $name: $(tail -n 1 "$out/sweep-$name.log")"
}

sweep() {
    mkdir -p "$out/sweep"
    (sweep_one 20b 1 1 1 "$(card 0)") &
    (sweep_one 120b 1 1 1 "$(card 1)") &
    wait
    for shape in 20b 120b; do
        sweep_one $shape 2 1 1
        sweep_one $shape 2 2 1
        sweep_one $shape 1 2 2
        "$bin/damask" plan --gpu-hour-usd 4 "$out"/sweep/$shape-*.json
        gate $? "plan $shape"
    done
    python3 "$here/gates.py" sweep "$out/sweep"
}

# The card of this number, as the driver counts them.
card() {
    local cards=${CUDA_VISIBLE_DEVICES:-0,1}
    cut -d, -f$(($1 + 1)) <<<"$cards"
}

run() {
    local parts=("${@:3}") code
    bin=$(cd "$1" && pwd) || return
    out=$2
    # Tests that find less than this fail, and do not skip themselves.
    export DAMASK_TEST_GPUS=${DAMASK_TEST_GPUS:-2} NANO_FIXTURES=$here/../fixtures/nano
    [ ${#parts[@]} -gt 0 ] || parts=("${PARTS[@]}")
    mkdir -p "$out" || return
    for part in "${parts[@]}"; do
        if ! [[ " ${PARTS[*]} " == *" $part "* ]]; then
            echo "no part $part; there are ${PARTS[*]}" >&2
            return 2
        fi
    done
    for part in "${parts[@]}"; do
        printf '\n## %s\n\n' "$part"
        SECONDS=0
        "$part" 2>&1 | tee "$out/$part.out"
        code=${PIPESTATUS[0]}
        echo "($part: $SECONDS s)"
        # A part that fails says of what; one that does not has crashed.
        [ "$code" = 0 ] || grep -q '^FAIL ' "$out/$part.out" || echo "FAIL $part: exit code $code" | tee -a "$out/$part.out"
        grep -qE '^(PASS|FAIL) ' "$out/$part.out" || echo "FAIL $part: no gate was reached" | tee -a "$out/$part.out"
    done
    printf '\n## gates\n\n'
    for part in "${parts[@]}"; do grep -E '^(PASS|FAIL) ' "$out/$part.out"; done | sort -s -k1,1 | tee "$out/gates.txt"
    ! grep -q '^FAIL' "$out/gates.txt"
}

case "${1-}" in
build) build "$2" ;;
run) run "${@:2}" ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
