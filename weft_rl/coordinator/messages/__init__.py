"""The coordinator's values as messages of ``weft.v1``, in pages where they are many."""
