"""Modules that a task puts on a backbone: projections, predictions of masked patches."""
