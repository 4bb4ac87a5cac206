"""Augmentation in batches on the device: every picture has its own parameters, keyed by (seed, epoch, picture, repeat)."""
