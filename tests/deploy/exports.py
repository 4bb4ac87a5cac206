"""Small models and photographs for the tests of exported models."""

import numpy as np
import torch

from tests.small import structures
from vitrail.data.datasets.pets import open_pets
from vitrail.data.decode import decode
from vitrail.models import build
from vitrail.models.preprocessing import Preprocessing


def make_model(name, **changes):
    """A shrunk model of the catalogue with random weights."""
    torch.manual_seed(0)
    model = build(structures()[name].replace(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.preprocessing = Preprocessing(model.architecture.image_size, 0.9)
    model.class_names = [f"class {index}" for index in range(model.architecture.classes)] or None
    return model


def photographs(count=4):
    """Real photographs, each of another size."""
    source = open_pets()["test"]
    return [
        np.ascontiguousarray(decode(source.encoded(17 * index))[: 128 - 9 * index, : 70 + 13 * index]) for index in range(count)
    ]
