"""BatchNorm over groups of images; tests of the results over micro-batches and processes are in test_distributed.py."""

import torch
from torch import nn

from vitrail.recipes import Recipe
from vitrail.training.batch_norm import group_batch_norms
from vitrail.training.distributed import Devices


def test_calls_with_different_numbers_of_groups_before_one_backward_pass():
    """As with global and local views: one group in the first call, three in the second."""
    norm = nn.BatchNorm2d(4)
    group_batch_norms(norm, Recipe(batch_size=4), Devices(torch.device("cpu")))
    inputs = [torch.randn(images, 4, 3, 3, requires_grad=True) for images in (4, 12)]
    sum((norm(x) * torch.arange(9.0).view(3, 3)).sum() for x in inputs).backward()
    expected = [x.detach().clone().requires_grad_() for x in inputs]
    parts = [part for x in expected for part in x.split(4)]
    sum((nn.functional.batch_norm(x, None, None, training=True) * torch.arange(9.0).view(3, 3)).sum() for x in parts).backward()
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
