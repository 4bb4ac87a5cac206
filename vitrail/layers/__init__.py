"""The parts: stems, token mixers, residual branches, positions, pooling layers.

Shape letters used below: B images, N patches, S prefix tokens (class, distillation), T = S + N tokens,
D width, H heads, C classes, K channels of an image or feature map.
"""
