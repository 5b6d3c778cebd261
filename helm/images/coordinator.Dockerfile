# The coordinator and the `weft` command; no torch.
#
#   docker build -f helm/images/coordinator.Dockerfile -t weft-coordinator:0.1.0 .
#
# Pin BASE by its digest where you build for production.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006 # the tag is in BASE
FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/weft
COPY . .
RUN PYTHON=/opt/weft/bin/python sh helm/images/install.sh coordinator

# hadolint ignore=DL3006
FROM ${BASE}
RUN groupadd --gid 10001 weft && useradd --uid 10001 --gid 10001 --no-create-home weft
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50051 50052 9090
ENTRYPOINT []
CMD ["weft", "coordinator", "--help"]
