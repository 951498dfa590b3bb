#!/usr/bin/env bash
# Checks what no compiler sees: Python files for names that nothing defines or uses, shell scripts for their syntax, and the scripts that need
# GPUs in miniature, with stand-ins for the programs that they run. 10 s. Needs Python 3.10 or newer; installs pyflakes into .venv/scripts, once.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.venv/scripts
if ! cmp -s tests/scripts/requirements.txt "$venv/installed.txt"; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/scripts/requirements.txt
    cp tests/scripts/requirements.txt "$venv/installed.txt"
fi
ours() { find .ci deploy docker docs fuzz helm kernels services shared tests -name target -prune -o -name "$1" -print0; }
ours '*.py' | xargs -0 "$venv/bin/pyflakes"
{ ours '*.sh'; ours run; } | xargs -0 -n 1 bash -n
exec python3 -B -m unittest --quiet tests/scripts/check.py
