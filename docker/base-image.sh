#!/usr/bin/env bash
# Makes a Debian base image without any registry: debootstrap, then docker import. For sites that pull no images, and for CI.
# usage: docker/base-image.sh [IMAGE]      default: damask-base:bookworm; does nothing if the image exists
# Environment: DEBIAN_MIRROR, if not Debian's default. Needs root and Debian's package debootstrap. Once; 75 s on two idle cores, minutes on busy ones.
set -euo pipefail

image=${1:-damask-base:bookworm}
if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image exists"
    exit 0
fi
command -v debootstrap >/dev/null || { echo 'debootstrap is missing: apt-get install debootstrap' >&2; exit 1; }
root=$(mktemp -d)
trap 'rm -rf "$root" "$root.log"' EXIT
chmod 755 "$root"   # becomes the image's /
echo "making $image from Debian's packages, which takes a minute or more"
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$root.log" 2>&1 \
    || { tail -n 20 "$root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" --one-file-system -c . | docker import --change 'CMD ["bash"]' - "$image" >/dev/null
echo "$image made"
