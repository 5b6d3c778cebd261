"""Versions on disk, to be served again after a restart."""
