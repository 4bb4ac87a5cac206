"""Speed and memory of models, compared with timm and with the peak of the device."""
