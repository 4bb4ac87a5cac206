"""Trainings of our own that the documentation speaks of: `python -m benchmarks.house --help`."""
