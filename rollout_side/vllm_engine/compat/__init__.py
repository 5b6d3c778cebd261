"""Differences between versions and builds of vLLM."""
