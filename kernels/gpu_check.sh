#!/bin/sh
# Runs the kernel tests, the memory checker and the benches on a machine with a GPU, without cargo.
#
#   kernels/gpu_check.sh build DIR    here: builds the test and bench binaries, strips them, puts them into DIR
#   kernels/gpu_check.sh run DIR OUT  there: runs them; OUT receives the logs and RESULTS.md
set -eu

build() {
    mkdir -p "$1"
    cargo test --release -p device -p kernels --no-run --message-format=json | copy_binaries "$1"
    cargo bench -p kernels --no-run --message-format=json | copy_binaries "$1"
    ls -l "$1"
}

# From cargo's messages: the executables of targets `kernels` and `driver`, as DIR/test, DIR/bench and DIR/driver.
copy_binaries() {
    python3 -c '
import json, shutil, subprocess, sys
for line in sys.stdin:
    message = json.loads(line)
    binary, target = message.get("executable"), message.get("target", {})
    if not binary or target["name"] not in ("kernels", "driver"):
        continue
    kind = target["kind"][0]
    name = "driver" if target["name"] == "driver" else {"test": "test", "bench": "bench"}.get(kind)
    if name:
        path = f"{sys.argv[1]}/{name}"
        shutil.copyfile(binary, path)
        subprocess.check_call(["strip", path])
        subprocess.check_call(["chmod", "+x", path])
' "$1"
}

run() {
    failed=0
    "$1/driver" --test-threads 1 >"$2/driver.log" 2>&1 || failed=1
    tail -n 3 "$2/driver.log"
    "$1/test" --test-threads 4 >"$2/test.log" 2>&1 || failed=1
    grep -E "^test |differ|want|panicked|got" "$2/test.log" | grep -v "\.\.\. ok" | head -n 60
    tail -n 2 "$2/test.log"
    "$1/bench" --bench >"$2/RESULTS.md" 2>"$2/bench.log" || failed=1
    tail -n 5 "$2/bench.log"
    cat "$2/RESULTS.md"
    return "$failed"
}

case "${1-}" in
build) build "$2" ;;
run) run "$2" "$3" ;;
*) sed -n '2,6p' "$0"; exit 2 ;;
esac
