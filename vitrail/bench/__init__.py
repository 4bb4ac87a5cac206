"""How fast a model is, beside others and beside what the device could do."""
