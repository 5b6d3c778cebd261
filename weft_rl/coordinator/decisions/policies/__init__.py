"""Policies: who owns one, how its versions are numbered, which are kept and served."""
