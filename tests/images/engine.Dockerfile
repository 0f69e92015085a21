# The small test engine: the child without vLLM, and an engine that behaves like one and starts in a second.
ARG BASE=vllmsnapshot.local/child-python:dev

FROM ${BASE}
COPY tests/node/engine/ tests/gpu/device.py /opt/vllmsnapshot/
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/vllmsnapshot
