# An image that serves a model: docker build -t forerun . && docker run -p 8000:8000 -v models:/models forerun
# For NVIDIA GPUs: docker build --build-arg DEVICE=cuda -t forerun:cuda . && docker run --gpus all ...
# For a Ray cluster: docker build --build-arg EXTRAS=server,ray -t forerun:ray .
ARG PYTHON=3.11
ARG BASE=python:${PYTHON}-slim
ARG DEVICE=cpu

FROM python:${PYTHON}-slim AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /forerun
COPY . .
# As for wheels that are published, a failed compilation ends the build instead of leaving the kernels out.
RUN CIBUILDWHEEL=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# torch from the index of CPU builds: from the default index it comes with several gigabytes of CUDA. wget is what KubeRay
# asks for a pod's health with.
FROM ${BASE} AS cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV TORCH_INDEX=${TORCH_INDEX} DEVICE_EXTRAS=""

# torch's CUDA builds bring the libraries, the host's container toolkit the driver; Triton compiles its launchers with gcc.
FROM ${BASE} AS cuda
ARG TORCH_INDEX=https://pypi.org/simple
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev wget && rm -rf /var/lib/apt/lists/*
ENV TORCH_INDEX=${TORCH_INDEX} DEVICE_EXTRAS=,gpu \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM ${DEVICE}
ARG TORCH=torch==2.13.0
ARG EXTRAS=server
# First and by itself, so that nothing else chooses its build.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}" --index-url "${TORCH_INDEX}"
# hadolint ignore=DL3013
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}${DEVICE_EXTRAS}]"
# By number, so that Kubernetes can see that it is not root. All that is written lies below /models, and /tmp.
RUN useradd --create-home --uid 1000 forerun && install -d -o forerun -g forerun /models
USER 1000:1000
ENV HF_HOME=/models/huggingface FORERUN_CACHE=/models/forerun TRITON_CACHE_DIR=/models/triton
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["forerun"]
CMD ["serve", "mini", "--drafter", "auto", "--host", "0.0.0.0"]
