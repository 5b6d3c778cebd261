"""Values that the decisions are made on: the pool, events and effects; and a step in the making."""
