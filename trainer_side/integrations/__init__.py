"""Integrations of Weft with training frameworks.

Each module is of one framework, and imports it.
"""
