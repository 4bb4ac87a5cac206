"""Checkpoint formats of other projects: tensor names, and the architecture inferred from names and shapes."""
