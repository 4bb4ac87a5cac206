"""The parts: stems, token mixers, residual branches, positions, readouts.

Shape letters used below: B images, N patches, S special tokens (class, distillation), T = S + N tokens,
D width, H heads, C classes, K channels of a picture or feature map.
"""
