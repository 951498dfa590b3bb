#!/usr/bin/env bash
# Builds the fuzz targets and runs them, for so many seconds in all (default 60). Exit code 0: nothing was found. What was found is in
# fuzz/artifacts, and `fuzz/target/x86_64-unknown-linux-gnu/release/TARGET FILE` shows it again. A corpus from earlier runs goes on.
#
# Coverage by LLVM's own pass, so that a stable compiler will do; --target keeps it out of build scripts and macros. Needs a C++ compiler
# (libFuzzer is built from source) and python3 (seeds).
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-60}
host=x86_64-unknown-linux-gnu

sancov='-Cllvm-args=-sanitizer-coverage'
RUSTFLAGS="-Cpasses=sancov-module $sancov-level=4 $sancov-inline-8bit-counters $sancov-pc-table $sancov-trace-compares --cfg fuzzing -Ccodegen-units=1" \
    cargo build --release --target $host

seed() { mkdir -p "corpus/$1" "artifacts/$1"; }
for target in harmony_parser kv_frame tokenizer_json; do seed $target; done
python3 seeds.py

fuzz() {
    local target=$1 share=$2
    shift 2
    echo "=== $target, $((seconds * share / 10)) s"
    "target/$host/release/$target" -max_total_time=$((seconds * share / 10)) -artifact_prefix="artifacts/$target/" -verbosity=0 \
        -print_final_stats=1 -timeout=10 -rss_limit_mb=4096 "$@" "corpus/$target" 2>&1 |
        sed -e '/Recommended dictionary/,/End of recommended/d' -e '/^INFO/d' -e '/^WARNING: Failed to find/d' -e '/NEW_FUNC/d' -e '/^stat::\(new\|peak\|slowest\)/d'
}
fuzz harmony_parser 6 -dict=harmony.dict -max_len=2048
fuzz kv_frame 2 -max_len=4096
fuzz tokenizer_json 2 -max_len=8192
