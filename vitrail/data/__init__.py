"""Sources of pictures and the deterministic order in which they are seen."""
