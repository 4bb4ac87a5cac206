"""Augmentation of batches on the device. The parameters of every image are drawn from its key (seed, epoch, index, repeat)."""
