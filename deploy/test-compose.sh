#!/usr/bin/env bash
# The compose file, for real: builds the images around target/release/damask without any registry, runs profile `cpu`, and has it chat, lose
# each of its containers, lose its network, and be replaced piece by piece (test_compose.py). Prints `N passed, N failed`.
# usage: deploy/test-compose.sh [--keep]      --keep leaves the containers running
# Needs a local Docker engine with docker-compose or `docker compose`, Debian's debootstrap, Python 3, root (for killing processes).
# With CI=true what is missing is installed from Debian. About 3 minutes; 75 s more when the base image has to be made.
set -euo pipefail
cd "$(dirname "$0")"

install() {
    local command=$1 package=$2
    command -v "$command" >/dev/null && return
    [ "${CI:-}" = true ] || { echo "$command is missing: apt-get install $package" >&2; exit 1; }
    apt-get install -y -qq --no-install-recommends "$package" >/dev/null
}

[ "${CI:-}" != true ] || apt-get update -qq
docker compose version >/dev/null 2>&1 || install docker-compose docker-compose
./check.sh
if ! docker info >/dev/null 2>&1; then
    echo 'SKIPPED: no Docker engine answers, so no container was started'
    exit 0
fi
install debootstrap debootstrap

export DAMASK_TAG=test COMPOSE_PROJECT_NAME=damask-test
log=$(mktemp)
../docker/build.sh --local-base --tag "$DAMASK_TAG" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
rm "$log"
exec python3 test_compose.py "$@"
