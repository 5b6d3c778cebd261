"""Telemetry of a server process: metrics, liveness and pages over HTTP; spans by OTLP.

Imported by server processes only: trainers have neither prometheus_client nor Starlette.
"""
