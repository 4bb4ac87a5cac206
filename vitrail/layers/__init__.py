"""Building blocks: patch embeddings, token mixers, residual blocks, position embeddings, pooling.

Shape letters in docstrings: B images, N patches, S prefix tokens (class, distillation), T = S + N tokens, D width (channels of
a token), H heads, C classes, K channels of an image or feature map.
"""
