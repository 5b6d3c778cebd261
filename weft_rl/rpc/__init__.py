"""Channels, servers, status mapping and the codec between protos and contract values."""
