"""Convolutional networks built from the names and shapes of their state dicts."""
