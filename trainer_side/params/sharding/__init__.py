"""Shards: which of a model's elements a rank holds, by each framework's word."""
