"""Predictions, metrics and probes."""
