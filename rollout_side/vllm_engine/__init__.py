"""vLLM as Weft's engine. Nothing outside this package imports vLLM.

``launch.open_engine`` starts one; ``replica.VllmReplica`` is the result and
implements ``rollout_side.engine.Engine``. ``worker.WeftWorker`` runs inside vLLM's
worker processes. What differs between vLLM's versions is in ``bridges``.
"""
