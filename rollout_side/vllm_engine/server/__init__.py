"""Serving process of vLLM: its start, its answers, its switches."""
