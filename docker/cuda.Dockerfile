# The image for prefill and decode on GPUs: the binary beside a pinned NCCL, on a Debian root.
# docker/build.sh --cuda prepares the build context: this file, `damask` (a Linux binary), `nccl/`, LICENSE. Needs no BuildKit.
#
# Not in here, on purpose: the driver's libraries (libcuda.so.1, libnvidia-ml.so.1), which the NVIDIA container runtime mounts so that they
# match the host's kernel module; and the CUDA toolkit, since kernels are embedded in the binary as sm_90a code that the driver loads.

# Any Debian or Ubuntu whose glibc is at least as new as the one that the binary was linked against; the build says so if it is not.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE}
RUN test -s /etc/ssl/certs/ca-certificates.crt \
    || { apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*; }
# libnccl.so.2 and the name libnccl.so, which is the one that the binary asks for.
COPY nccl/lib /usr/local/lib
COPY nccl/LICENSE /usr/share/doc/nccl/LICENSE
COPY LICENSE /usr/share/doc/damask/LICENSE
COPY damask /usr/local/bin/damask
RUN ldconfig && ldconfig -p | grep -q 'libnccl.so ' && damask --version
ARG VERSION=unknown
ARG REVISION=unknown
ARG NCCL_VERSION=unknown
LABEL org.opencontainers.image.title="damask-cuda" \
      org.opencontainers.image.description="Serves gpt-oss with separate prefill and decode: GPU workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      damask.nccl.version="${NCCL_VERSION}"
# What the NVIDIA container runtime mounts: libcuda (compute) and NVML (utility).
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/damask"]
