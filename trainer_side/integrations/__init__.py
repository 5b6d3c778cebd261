"""Weft in the frameworks that people train with.

Each module is of one framework, and imports it.
"""
