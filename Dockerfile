# An image that serves a model on CPUs: docker build -t forerun . && docker run -p 8000:8000 -v models:/models forerun
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /forerun
COPY . .
# As for wheels that are published, a failed compilation ends the build instead of leaving the kernels out.
RUN CIBUILDWHEEL=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# First and by itself, from the index of CPU builds: from the default index torch comes with several gigabytes of CUDA.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir "$(echo /wheels/*.whl)[server]"
RUN useradd --create-home forerun && install -d -o forerun -g forerun /models
USER forerun
ENV HF_HOME=/models/huggingface FORERUN_CACHE=/models/forerun
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["forerun"]
CMD ["serve", "mini", "--drafter", "auto", "--host", "0.0.0.0"]
