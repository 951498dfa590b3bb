#!/usr/bin/env bash
# Builds the images damask:TAG (no CUDA) and, with --cuda, damask-cuda:TAG around a binary that exists already.
# usage: docker/build.sh [--cuda] [--binary FILE] [--tag TAG] [--base IMAGE | --local-base] [--nccl FILE]
#   --binary FILE   default target/release/damask (cargo build --release)
#   --tag TAG       default: the version in Cargo.toml
#   --base IMAGE    default debian:bookworm-slim; any Debian or Ubuntu, from any mirror
#   --local-base    a base made by docker/base-image.sh, where no registry is reachable
#   --nccl FILE     a libnccl.so.2; default: NVIDIA's wheel of the release below, by pip, its checksum verified
set -euo pipefail
cd "$(dirname "$0")/.."

# The release that the binary's bindings were made for. A newer one works too: what needs 2.29 or 2.30 is gated by the version found at run time.
nccl_version=2.28.9
nccl_sha256=e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42

version=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
cuda=false binary=target/release/damask tag=$version base=debian:bookworm-slim nccl=
while [ $# -gt 0 ]; do
    case $1 in
        --cuda) cuda=true ;;
        --binary) binary=$2; shift ;;
        --tag) tag=$2; shift ;;
        --base) base=$2; shift ;;
        --local-base) base=damask-base:bookworm; docker/base-image.sh "$base" ;;
        --nccl) nccl=$2 nccl_version=unknown; shift ;;
        *) sed -n '2,/^set/s/^# //p' "$0" >&2; exit 2 ;;
    esac
    shift
done
[ -x "$binary" ] || { echo "$binary is missing: cargo build --release, or name a binary with --binary" >&2; exit 1; }
# Every compiled kernel has a section of this name.
if $cuda && ! grep -aqF .nv.info "$binary"; then
    echo "$binary was built without nvcc and has no GPU kernels: NVCC=/usr/local/cuda/bin/nvcc cargo build --release (docs/gpu.md)" >&2
    exit 1
fi
if ! docker image inspect "$base" >/dev/null 2>&1; then
    docker pull "$base" || { echo "the base $base cannot be pulled: --base names another, --local-base makes one without a registry" >&2; exit 1; }
fi

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT

prepare_nccl() {
    mkdir -p "$context/nccl/lib"
    if [ -n "$nccl" ]; then
        cp -L "$nccl" "$context/nccl/lib/libnccl.so.2"
        echo "see https://github.com/NVIDIA/nccl/blob/master/LICENSE.txt" >"$context/nccl/LICENSE"
    else
        echo "nvidia-nccl-cu13==$nccl_version --hash=sha256:$nccl_sha256" >"$context/nccl.txt"
        python3 -m pip download --quiet --no-deps --require-hashes --only-binary :all: --platform manylinux_2_18_x86_64 \
            --dest "$context/wheel" --requirement "$context/nccl.txt"
        python3 -m zipfile -e "$context"/wheel/*.whl "$context/wheel"
        mv "$context/wheel/nvidia/nccl/lib/libnccl.so.2" "$context/nccl/lib"
        find "$context/wheel" -iname 'license*' -type f -exec cp {} "$context/nccl/LICENSE" ';'
        rm -rf "$context/wheel" "$context/nccl.txt"
    fi
    ln -s libnccl.so.2 "$context/nccl/lib/libnccl.so"
}

build() {
    docker build --force-rm --file "$context/$1.Dockerfile" --tag "$2:$tag" --build-arg "BASE_IMAGE=$base" --build-arg "VERSION=$version" \
        --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" "${@:3}" "$context"
}

cp docker/*.Dockerfile LICENSE "$context"
# Line tables are two thirds of a release binary; symbol names stay, so that a backtrace still says where.
strip --strip-debug -o "$context/damask" "$binary"
build slim damask
if $cuda; then
    prepare_nccl
    build cuda damask-cuda --build-arg "NCCL_VERSION=$nccl_version"
fi
docker images --filter "reference=damask*:$tag" --format '{{.Repository}}:{{.Tag}} {{.Size}}'
