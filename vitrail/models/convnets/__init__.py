"""Convolutional networks with the tensor names of their published weights: ResNet, RegNet, EfficientNet-Lite."""
