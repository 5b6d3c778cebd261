"""Deltas: pushes that send what has changed since the version that the pool committed last."""
