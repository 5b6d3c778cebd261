"""Sockets and descriptors between processes of one host."""
