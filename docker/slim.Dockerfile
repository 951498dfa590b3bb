# The image for everything that needs no GPU: gateway, router, and all four services in the compose profile `cpu`.
# It holds the binary, the shared libraries that it names, CA certificates, and nothing else: no shell, no package manager.
# docker/build.sh prepares the build context: this file, `damask` (a Linux binary) and LICENSE. Needs no BuildKit.

# Any Debian or Ubuntu whose glibc is at least as new as the one that the binary was linked against; the build says so if it is not.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS files
# Debian's slim images have no certificates; the root file system of docker/base-image.sh has them, and then no network is needed here.
RUN test -s /etc/ssl/certs/ca-certificates.crt \
    || { apt-get update && apt-get install -y --no-install-recommends ca-certificates; }
COPY damask /usr/local/bin/damask
COPY LICENSE /usr/share/doc/damask/LICENSE
RUN set -eu; \
    damask --version; \
    mkdir -p /image/etc; \
    ldd /usr/local/bin/damask | grep -o '/[^ ]*' | xargs cp -L --parents -t /image; \
    cp --parents -t /image /usr/local/bin/damask /usr/share/doc/damask/LICENSE; \
    cp -L --parents -t /image /etc/ssl/certs/ca-certificates.crt; \
    echo 'damask:x:10001:10001::/nonexistent:/usr/sbin/nologin' > /image/etc/passwd; \
    echo 'damask:x:10001:' > /image/etc/group; \
    # /etc/hosts before DNS, as on any host
    echo 'hosts: files dns' > /image/etc/nsswitch.conf; \
    install -d -m 1777 /image/tmp

FROM scratch
COPY --from=files /image /
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="damask" \
      org.opencontainers.image.description="Serves gpt-oss with separate prefill and decode: gateway, router, CPU workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/damask"]
