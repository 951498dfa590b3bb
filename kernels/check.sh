#!/bin/sh
# Compiles every kernel and prints what each needs of a multiprocessor. Needs no GPU. Fails if a kernel does not compile, if it keeps
# registers in memory (spills or a stack frame), or if ptxas had to serialise its wgmmas.
#
# Uses $NVCC, or nvcc on PATH, or installs the compiler from PyPI into $DAMASK_NVCC_VENV (target/nvcc).
set -eu
cd "$(dirname "$0")"

# One set of versions: later cuobjdump or cccl releases do not match this compiler.
PACKAGES="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
          nvidia-cuda-runtime==13.0.96"

find_nvcc() {
    if [ -n "${NVCC-}" ]; then
        echo "$NVCC"
    elif command -v nvcc; then
        :
    else
        venv=${DAMASK_NVCC_VENV-../target/nvcc}
        if ! ls "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc >/dev/null 2>&1; then
            python3 -m venv "$venv" >&2
            # shellcheck disable=SC2086
            "$venv/bin/pip" install --quiet --no-deps $PACKAGES >&2 || return 1
        fi
        ls "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc
    fi
}

nvcc=$(find_nvcc) || {
    echo "skipped: no nvcc here, and it could not be installed from PyPI"
    exit 0
}
"$nvcc" --version | tail -n 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Two at a time, each with its report beside it; xargs fails if one does.
for source in cuda/*/*.cu; do
    name=$(basename "$source" .cu)
    [ "$source" = "cuda/$name/$name.cu" ] && echo "$name"
done | xargs -P 2 -I '{}' sh -c '
    "$1" -cubin $4 -Xptxas -v -o "$2/$3.cubin" "cuda/$3/$3.cu" >"$2/$3.log" 2>&1 || { cat "$2/$3.log"; exit 1; }
' sh "$nvcc" "$work" '{}' "$(cat nvcc.flags)"

python3 - "$work"/*.log <<'PYTHON'
import pathlib, re, sys

print(f"{'kernel':32} {'registers':>9} {'shared':>7} {'stack':>6} {'spilled':>8}")
failures, kernels = [], 0
for path in map(pathlib.Path, sys.argv[1:]):
    name = stack = spilled = None
    for line in path.read_text().splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spilled = int(found[1]), int(found[2]) + int(found[3])
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            print(f"{name:32} {found[1]:>9} {shared[1] if shared else 0:>7} {stack:>6} {spilled:>8}")
            kernels += 1
            if stack or spilled:
                failures.append(f"{name} keeps registers in memory")
        elif re.search(r"C75\d\d.*wgmma|warning|error", line):
            failures.append(f"{path.stem}: {line.strip()}")
print(f"{kernels} kernels; dynamic shared memory is chosen at launch")
for failure in failures:
    print("failed:", failure)
sys.exit(bool(failures) or kernels == 0)
PYTHON
