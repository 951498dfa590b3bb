#!/usr/bin/env bash
# Checks the chart with Helm's own engine, for the defaults and every example: lint, rendering, Kubernetes' schemas, the policy that all pods
# keep, references between objects, what must be refused, and the rendered service configs by the binary, if it has been built.
# Needs Python 3.10 or newer; no helm, no cluster. Installs helm/requirements.txt into .venv/helm (150 MB to fetch, once).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv/helm
if ! cmp -s helm/requirements.txt "$venv/installed.txt"; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r helm/requirements.txt
    cp helm/requirements.txt "$venv/installed.txt"
fi
exec "$venv/bin/python" helm/check.py
