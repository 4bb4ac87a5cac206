"""Trainings whose results the documentation gives: `python -m benchmarks.default_recipes --help`."""
