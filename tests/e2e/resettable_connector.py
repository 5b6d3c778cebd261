"""vLLM's example of a KV connector, with a reset: it finds blocks by tokens alone, in files."""

from __future__ import annotations

import shutil

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ResettableConnector(ExampleConnector):  # type: ignore[misc]
    """In the place of those that need a GPU."""

    def reset_cache(self) -> bool:
        """Remove what is stored."""
        shutil.rmtree(self._storage_path, ignore_errors=True)
        return True
