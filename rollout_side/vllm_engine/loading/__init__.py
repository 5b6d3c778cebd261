"""Putting received bytes into the parameters of a running model."""
