"""``weft doctor``: what stands between this machine and the pool, and what to do about it."""
