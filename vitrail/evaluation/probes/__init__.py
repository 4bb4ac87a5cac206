"""Probes of frozen features: k-NN, linear, few-shot, retrieval and their grids."""
