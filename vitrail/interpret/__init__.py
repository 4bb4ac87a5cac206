"""Interpretation of predictions: attention rollout and patch evidence."""
