"""Trainings of our own that the documentation speaks of: `python -m benchmarks.default_recipes --help`."""
