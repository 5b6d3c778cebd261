"""A push in which each rank sends what it holds: its plan, its buckets, the further ranks."""
