"""Image sources, deterministic sampling, decoding, loading and augmentation."""
