#!/bin/sh
# Runs the kernel tests, the memory checker and the benches on a machine with a GPU, without cargo.
#
#   kernels/gpu_check.sh build DIR         here: builds the test and bench binaries, strips them, puts them into DIR
#   kernels/gpu_check.sh run DIR OUT       there: runs them; OUT receives the logs and RESULTS.md
#   kernels/gpu_check.sh sanitize DIR OUT  there: runs tests under compute-sanitizer; OUT receives the logs and SANITIZER.md.
#                                          MODULES="router sample" in the environment: those alone
#
# `sanitize` checks memory (memcheck) in the tests of every kernel and in steps of nano, and shared-memory races (racecheck) in those of
# every kernel. racecheck does not know that an mbarrier orders the copy engine's writes before reads, nor that a cluster's barrier orders
# blocks: what it reports for kernels that use them is counted, and is not a failure.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
# Tests that find no GPU fail, and do not skip themselves.
export DAMASK_TEST_GPUS=1 NANO_FIXTURES="$here/../tests/fixtures/nano"

build() { python3 "$here/../tests/gpu/binaries.py" "$1" driver kernels bench engine; }

# Whether a log of tests says that some passed.
some_passed() { grep -qE '^test result: .* [1-9][0-9]* passed' "$1"; }

run() {
    failed=0
    "$1/driver" --test-threads 1 >"$2/driver.log" 2>&1 || failed=1
    some_passed "$2/driver.log" || failed=1
    tail -n 3 "$2/driver.log"
    # Ranks that share a GPU wait for each other's kernels: nothing may run beside those tests.
    "$1/kernels" --test-threads 4 --skip peers --skip groups >"$2/test.log" 2>&1 || failed=1
    some_passed "$2/test.log" || failed=1
    "$1/kernels" peers groups --test-threads 1 >>"$2/test.log" 2>&1 || failed=1
    grep -E "^test |differ|want|panicked|got" "$2/test.log" | grep -v "\.\.\. ok" | head -n 60
    tail -n 2 "$2/test.log"
    "$1/bench" --bench >"$2/RESULTS.md" 2>"$2/bench.log" || failed=1
    tail -n 5 "$2/bench.log"
    cat "$2/RESULTS.md"
    [ -s "$2/RESULTS.md" ] || failed=1
    return "$failed"
}

# Kernels whose shared memory is written by the copy engine or read across a cluster.
ASYNC="decode_attention fp8_gemm prefill_attention router sample skinny_experts skinny_gemm tile_gemm"
# Tests of large shapes, minutes each under a checker, whose kernels smaller ones reach too.
SLOW="--skip real_experts --skip every_width --skip logits_stay --skip a_long_prompt --skip the_same_bits --skip many_tokens"

# One tool on the tests of one module; a row of the table, and status 1 for an error that counts.
check() {
    tool=$1 module=$2 log=$4/sanitizer-$1-$2.log
    start=$(date +%s)
    status=0
    # shellcheck disable=SC2086
    DAMASK_TEST_SEED=1 timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 77 "$3" $5 --test-threads 1 $SLOW >"$log" 2>&1 ||
        status=$?
    tests=$(grep -c '\.\.\. ok' "$log" || true)
    found=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/=* *//' | tail -n 1)
    echo "| $tool | $module | $tests | ${found:-no summary} | $(($(date +%s) - start)) |" | tee -a "$4/SANITIZER.md"
    [ "$tests" != 0 ] || return 1
    [ "$status" = 0 ] && return 0
    # Only what the tool found, in a kernel whose ordering it cannot see, is no failure.
    case "$tool $ASYNC " in
    "racecheck "*" $module "*) [ "$status" = 77 ] ;;
    *) return 1 ;;
    esac
}

sanitize() {
    failed=0
    printf '| tool | tests of | passed | found | s |\n|---|---|---|---|---|\n' | tee "$2/SANITIZER.md"
    all=$("$1/kernels" --list | sed -n 's/^\([a-z_0-9]*\)::.*: test$/\1/p' | sort -u)
    [ -n "$all" ] || { echo "$1/kernels lists no tests" >&2; return 1; }
    for module in ${MODULES-$all nano}; do
        if [ "$module" = nano ]; then
            check memcheck nano "$1/engine" "$2" "nano::tokens_are_the_same nano::masked_tokens" || failed=1
            continue
        fi
        case $module in # products of real shapes take minutes, and draws that are not greedy one each under racecheck
        fp8_gemm | tile_gemm) memory=$module::a_few_strips races=$memory ;;
        skinny_experts | skinny_gemm) memory=$module:: races=$module::a_few_strips ;;
        sample) memory=sample:: races=sample::greedy ;;
        *) memory=$module:: races=$memory ;;
        esac
        check memcheck "$module" "$1/kernels" "$2" "$memory" || failed=1
        check racecheck "$module" "$1/kernels" "$2" "$races" || failed=1
    done
    return "$failed"
}

case "${1-}" in
build) build "$2" ;;
run) run "$2" "$3" ;;
sanitize) sanitize "$2" "$3" ;;
*) sed -n '2,11p' "$0"; exit 2 ;;
esac
