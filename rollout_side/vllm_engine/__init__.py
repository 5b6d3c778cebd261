"""vLLM as Weft's engine. Nothing outside this package imports vLLM.

Four floors, each of which knows only those below: ``server`` (``launch.open_engine`` starts
an engine; ``replica.VllmReplica`` is the result and implements
``rollout_side.engine.Engine``), ``worker`` (``extension.WeftWorker`` runs inside vLLM's
worker processes), ``loading``, and ``compat`` for what differs between vLLM's versions.
"""
