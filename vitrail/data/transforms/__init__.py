"""Augmentation in batches on the device: every image has its own parameters, keyed by (seed, epoch, image, repeat)."""
