"""What a server process shows of itself: over HTTP metrics, liveness, and pages of its own; spans
by OTLP.

Imported by server processes only: trainers do not have prometheus_client.
"""
