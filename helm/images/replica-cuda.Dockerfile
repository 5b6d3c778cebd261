# A replica on NVIDIA GPUs. The CUDA libraries are wheels that vLLM brings; the driver is the
# node's, put in by NVIDIA's container runtime.
#
#   docker build -f helm/images/replica-cuda.Dockerfile -t weft-replica-cuda:0.1.0 .
#
# Pin BASE by its digest where you build for production. Kernels that are compiled by nvcc as they
# are needed (some of FlashInfer's) want a BASE that has it: a CUDA devel image with this Python.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006 # the tag is in BASE
FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/weft
COPY . .
RUN PYTHON=/opt/weft/bin/python sh helm/images/install.sh replica-cuda

# hadolint ignore=DL3006
FROM ${BASE}
# A C compiler, which Triton calls, and the RDMA libraries that NCCL looks for. Versions are the
# base's own.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers libnuma1 librdmacm1 \
  && rm -rf /var/lib/apt/lists/* \
  && groupadd --gid 10001 weft && useradd --uid 10001 --gid 10001 --no-create-home weft
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
  NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50051 50052 8000 9090
ENTRYPOINT []
CMD ["weft", "rollout", "--help"]
