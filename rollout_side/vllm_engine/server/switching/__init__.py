"""Switches of an engine from one base to another, and to sleep, and the pauses for them."""
