# openspec as an image. Two targets, `cpu` and `cuda`; docs/quickstart.md#in-a-container has the commands.
# hadolint checks this file in `tests/run lint`. No test builds it.

# ---- CPU --------------------------------------------------------------------------------------------
FROM python:3.12-slim-bookworm AS cpu-base
ARG TORCH=2.13.0
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH"

FROM cpu-base AS cpu-wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM cpu-base AS cpu
COPY --from=cpu-wheel /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl \
    && useradd --uid 10001 openspec \
    && install --directory --owner=openspec /models
ENV HF_HOME=/models
USER 10001
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --start-period=600s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["python", "-m", "openspec.serve", "--host", "0.0.0.0"]

# ---- CUDA: nvcc of torch's own CUDA version, the pair that .ci/run compiles with ----------------------
FROM nvidia/cuda:13.0.0-base-ubuntu24.04 AS cuda-base
ARG TORCH=2.11.0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/openspec
ENV PATH=/opt/openspec/bin:$PATH
RUN pip install --no-cache-dir "torch==$TORCH"

FROM nvidia/cuda:13.0.0-devel-ubuntu24.04 AS cuda-wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-base /opt/openspec /opt/openspec
ENV PATH=/opt/openspec/bin:$PATH
# For example 90a alone, which builds sooner and runs on H100 and H200.
ARG CUDA_ARCHS=80;90a;100;120
WORKDIR /src
COPY . .
RUN CMAKE_ARGS="-DOPENSPEC_CUDA=ON '-DOPENSPEC_CUDA_ARCHS=$CUDA_ARCHS'" \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM cuda-base AS cuda
COPY --from=cuda-wheel /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl \
    && useradd --uid 10001 openspec \
    && install --directory --owner=openspec /models
ENV HF_HOME=/models
USER 10001
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --start-period=600s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["python", "-m", "openspec.serve", "--host", "0.0.0.0"]
