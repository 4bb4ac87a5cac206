"""Runs: preparing, running, resuming, reporting and comparing trainings."""
