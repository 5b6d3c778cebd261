"""Containers of the standard library's kind, for everybody."""
