"""Readers of data sets: folders, Parquet, tar shards, CIFAR, MNIST, tables, the hub."""
