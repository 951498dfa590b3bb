#!/usr/bin/env bash
# Real clients against the real stack: the official openai package, openai-agents, LangChain, a Python client generated from proto/, and the
# Rust examples. Needs target/release/damask and Python 3.10 or newer; packages go to a virtual environment under target/.
#
#   tests/clients/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${DAMASK_CLIENTS_VENV:-target/clients-venv}
work=$(mktemp -d)
damask=target/release/damask
stack=

finish() {
    local code=$?
    if [ -n "$stack" ]; then
        kill "$stack" 2>/dev/null || true
        # A service that dies at its exit has answered everything before.
        wait "$stack" || { echo "the stack ended with exit code $?" >&2; code=1; }
    fi
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade --requirement tests/clients/requirements.txt
mkdir "$work/stubs"
"$venv/bin/python" -m grpc_tools.protoc --proto_path=proto --python_out="$work/stubs" --grpc_python_out="$work/stubs" \
    damask/v1/inference.proto damask/v1/gateway.proto

sha() { printf %s "$1" | sha256sum | cut -d' ' -f1; }
# sk-single may have one request at a time; sk-frugal 300 tokens a minute; sk-suspended none.
export DAMASK_GATEWAY__API_KEYS="[
    {name: tests, sha256: $(sha sk-tests)},
    {name: other, sha256: $(sha sk-other)},
    {name: single, sha256: $(sha sk-single), limits: {concurrent_requests_max: 1}},
    {name: frugal, sha256: $(sha sk-frugal), limits: {tokens_per_minute: 300}},
    {name: suspended, sha256: $(sha sk-suspended), suspended: true}]"
export DAMASK_GATEWAY__RESPONSES_STORE="{file: $work/responses.redb}"
"$damask" --log-level warn up --listen 127.0.0.1:0 --ready-file "$work/ready.json" </dev/null &
stack=$!
for _ in $(seq 600); do
    [ -e "$work/ready.json" ] && break
    kill -0 "$stack" || { echo 'the stack did not start' >&2; exit 1; }
    sleep 0.1
done
unset DAMASK_GATEWAY__API_KEYS DAMASK_GATEWAY__RESPONSES_STORE

export DAMASK="$PWD/$damask" DAMASK_READY_FILE="$work/ready.json" PYTHONPATH="$work/stubs" PYTHONDONTWRITEBYTECODE=1
export OPENAI_AGENTS_DISABLE_TRACING=1
address() { "$venv/bin/python" -c "import json; print(json.load(open('$work/ready.json'))['$1'])"; }
# Of the whole workspace, as its tests are: with the features of one package alone, cargo would build most crates once more.
cargo build --release --quiet --workspace --examples
target/release/examples/generate "$(address router)"
target/release/examples/chat "$(address gateway)" sk-single
"$venv/bin/pytest" --quiet -p no:cacheprovider --durations=5 tests/clients "$@"
