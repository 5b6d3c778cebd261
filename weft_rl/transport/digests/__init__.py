"""Digests of tensors' bytes on hosts and GPUs, and copies that are digested as they are read."""
