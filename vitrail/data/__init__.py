"""Sources of images and the deterministic order in which they are seen."""
