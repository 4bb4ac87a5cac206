"""Little teachers, images and stores of their answers."""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.convnets import small_resnet
from vitrail.data.datasets.lookup import open_source
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build
from vitrail.teachers import open_teacher
from vitrail.teachers.annotation import AnnotationRequest, annotate
from vitrail.teachers.label_store import LabelStore

PREPARED = Preprocessing(image_size=(16, 16), crop_ratio=0.8, interpolation="bilinear")


def network(classes=7, seed=0):
    """A ResNet that answers differently for different images."""
    torch.manual_seed(seed)
    made = build(small_resnet(classes=classes)).eval()
    torch.nn.init.normal_(made.head.weight, std=4.0)
    return made


def make_teacher(classes=7, seed=0, names=None):
    made = network(classes, seed)
    return open_teacher(made, preprocessing=PREPARED, classes=names)


def make_source(folder, count=12, size=(24, 20)):
    """`count` images of noise of each of three classes, no two alike."""
    for place, name in enumerate(("blue", "green", "red")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng([place, number]).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03}.png")
    return open_source(str(folder))


def make_store(folder, teacher, source, shard_size=10, **request):
    annotate(teacher, source, folder, AnnotationRequest(**({"batch_size": 4} | request)), workers=0, shard_size=shard_size)
    return LabelStore.open(folder)


def contents(folder: Path):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def in_a_process(work):
    """How a forked process ended that did this: its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
