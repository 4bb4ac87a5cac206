"""The papers' claims, tried again at a small scale: `python -m benchmarks.evidence --help`."""
