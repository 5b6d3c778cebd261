"""Packing of tensors into buckets."""
