"""Ranks of one trainer: how they agree, and bring bytes to each other."""
