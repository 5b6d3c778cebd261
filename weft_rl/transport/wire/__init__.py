"""Buckets as they travel."""
