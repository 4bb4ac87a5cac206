"""Probes of frozen features: k-NN, linear, few-shot, retrieval, label hierarchies, spectrum."""
