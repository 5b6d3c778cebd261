"""Purposes of transfers, each with its data and its rules."""
