"""Checkpoint formats of other projects: tensor names and architectures, in and out."""
