"""Data set formats: folders, Parquet, tar shards, CIFAR, IDX (MNIST), tables and the Hugging Face hub."""
