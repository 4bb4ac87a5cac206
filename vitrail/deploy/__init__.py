"""Models rewritten for inference: folded, quantized, compiled and captured, and compared with the original."""
