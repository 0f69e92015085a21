# Prometheus from Debian, for tests.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS fetch
# A machine's own apt settings (a proxy, say): `--secret id=apt-conf,src=…`, or nothing.
RUN --mount=type=secret,id=apt-conf <<'SCRIPT'
set -eu
if [ -s /run/secrets/apt-conf ]; then export APT_CONFIG=/run/secrets/apt-conf; fi
cd /tmp
apt-get update -q
# Only the package itself: what it depends on serves Debian's start-up scripts and its old web pages.
apt-get download -q -o APT::Sandbox::User=root prometheus
dpkg -x prometheus_*.deb /fetched
SCRIPT

FROM ${BASE}
COPY --from=fetch /fetched/usr/bin/prometheus /usr/bin/prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
