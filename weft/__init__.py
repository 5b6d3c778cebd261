"""Weft: a weight fabric for trainers. What both sides share."""

__version__ = "0.1.0"
