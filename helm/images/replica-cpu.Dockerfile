# A replica on a CPU, for trials: vLLM's build for x86-64 CPUs.
#
#   docker build -f helm/images/replica-cpu.Dockerfile -t weft-replica-cpu:0.1.0 .
#
# Pin BASE by its digest where you build for production.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006 # the tag is in BASE
FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/weft
COPY . .
RUN PYTHON=/opt/weft/bin/python sh helm/images/install.sh replica-cpu

# hadolint ignore=DL3006
FROM ${BASE}
# What vLLM's extension links to, and a compiler for torch.compile. Versions are the base's own.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends g++ libnuma1 \
  && rm -rf /var/lib/apt/lists/* \
  && groupadd --gid 10001 weft && useradd --uid 10001 --gid 10001 --no-create-home weft
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50051 50052 8000 9090
ENTRYPOINT []
CMD ["weft", "rollout", "--help"]
