"""Sharing of received buckets with a replica's other ranks, which learn over a socket what to
map."""
