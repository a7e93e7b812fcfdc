# The plugin's image: Debian's Python, what it runs on, and nothing else: no shell, no package manager,
# no compiler. amd64 is built and run by `make test-image`; arm64 takes the same steps and is untested.
#
#   make image BASE=debian:bookworm-slim@sha256:... IMAGE=registry.example.com/fpga-plugin:0.1.0
#   docker push registry.example.com/fpga-plugin:0.1.0
#
# BASE is any Debian 12 or later, by its digest: a tag names another content each week. It has no default,
# because a digest that nobody has compared with the registry's would only look like one; `make image`
# takes none without. What comes from PyPI is pinned with hashes in deploy/image/requirements.lock
# (`make lock`, `make audit`); what apt-get adds is what Debian has signed on the day of the build.
ARG BASE

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libudev1 python3 python3-pip \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/image /build
# Wheels only: nothing is compiled, and no setup.py of a stranger runs.
RUN python3 -m pip install --no-cache-dir --no-compile --no-deps --only-binary :all: --require-hashes \
      --root-user-action ignore --requirement /build/requirements.lock --target /build/packages
COPY fpga_plugin /build/packages/fpga_plugin
COPY LICENSE /build/LICENSE
RUN python3 /build/collect.py /build/packages /root-of-image

FROM scratch
ARG BASE
# The commit, from `make image`; empty where the source is no clean clone.
ARG REVISION
COPY --from=build /root-of-image /
# Of device nodes, of kubelet's sockets and of sysfs root is the owner; what the process does not need
# of root's privileges it drops itself (docs/security.md).
USER 0:0
WORKDIR /
ENTRYPOINT ["/usr/bin/python3", "-I", "-m", "fpga_plugin"]
CMD ["run"]
EXPOSE 9102
LABEL org.opencontainers.image.title="fpga-plugin" \
      org.opencontainers.image.description="Kubernetes device plugin for FPGAs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
