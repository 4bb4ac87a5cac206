"""Targets from a teacher: a network that predicts at every step, or a label store of predictions made once."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.atomic_files import file_sha256
from vitrail.data.class_matching import imagenet
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.models.config import format_size
from vitrail.recipes.schema import Recipe
from vitrail.teachers.class_index import match_source
from vitrail.teachers.fixed_shape import first_line
from vitrail.teachers.label_store import MANIFEST, LabelStore
from vitrail.teachers.lookup import open_teacher
from vitrail.teachers.sidecar import sidecar_path
from vitrail.teachers.teacher import Teacher

MAX_ENLARGEMENT = 2  # of the student's images over those the teacher was trained on
RENAME_CLASSES = "give the data's classes the teacher's names, or their WordNet ids in wordnet_ids.json next to the data"


def digests(recipe: Recipe) -> dict[str, str]:
    """By path, a digest of the teacher's and the label store's files; a store's manifest has those of its shards."""
    found = {}
    paths = (recipe.distillation.teacher if recipe.distillation.kind != "none" else "", recipe.token_labels.store)
    for path in filter(os.path.exists, filter(None, paths)):
        files = [os.path.join(path, name) for name in (MANIFEST, "best.safetensors", "model.safetensors", "pytorch_model.bin")]
        file = next(filter(os.path.isfile, [path, *files]), None)
        if file is not None:
            found[path] = file_sha256(Path(file))
        if os.path.isfile(sidecar_path(path)):
            found[str(sidecar_path(path))] = file_sha256(sidecar_path(path))
    return found


@dataclass(frozen=True)
class OnlineTeacher:
    """A network that predicts the student's images at every step."""

    teacher: Teacher
    index: Tensor  # int64 [student's classes]: the teacher's class of each
    mean: tuple[float, ...]  # of the student's images
    std: tuple[float, ...]
    messages: list[str]

    def logits(self, images: Tensor) -> Tensor:
        """[B, student's classes] for the input of the student."""
        out: Tensor = self.teacher(images, self.mean, self.std)[:, self.index]
        return out


def open_online_teacher(recipe: Recipe, source: Source, device: torch.device) -> OnlineTeacher:
    """The recipe's teacher, after one prediction of a blank image of the student's size."""
    path, augmentation = recipe.distillation.teacher, recipe.augmentation
    teacher = open_teacher(path, device)
    index = match_classes(teacher, source, path).to(device)
    messages = class_order_message(teacher.class_names, teacher.classes, source) + choose_size(teacher, recipe)
    check_prediction(teacher, recipe, device)
    return OnlineTeacher(teacher, index, augmentation.mean, augmentation.std, messages)


def check_prediction(teacher: Teacher, recipe: Recipe, device: torch.device) -> None:
    """Raise UserError if the teacher cannot predict a blank image of the student's size."""
    augmentation, path = recipe.augmentation, recipe.distillation.teacher
    blank = torch.zeros(1, len(augmentation.mean), *augmentation.image_size, device=device)
    try:
        logits = teacher(blank, augmentation.mean, augmentation.std)
    except Exception as error:  # a network of any origin may raise anything
        (height, width), reason = augmentation.image_size, first_line(error).rstrip(".")
        raise UserError(
            f"The teacher {path} fails on the student's images of {height} x {width} ({reason}): use another teacher, or run "
            "vitrail annotate once at the teacher's own size."
        ) from None
    if not bool(logits.isfinite().all()):
        raise UserError(f"The teacher {path} predicts NaN or Inf: its weights are damaged, use others.")


def match_classes(teacher: Teacher | LabelStore, source: Source, path: str) -> Tensor:
    """int64 [student's classes]: the teacher's class of each."""
    advice = RENAME_CLASSES
    if teacher.class_names is None and teacher.classes != len(imagenet()):
        annotate = isinstance(teacher, LabelStore) or not os.path.exists(path)
        advice = f"name the teacher's {'with vitrail annotate --classes' if annotate else f'in {sidecar_path(path)}'}"
    return match_source(teacher, source, advice, "the student").indices


def class_order_message(names: list[str] | None, count: int, source: Source) -> list[str]:
    """A message if only the order determines which of the teacher's classes is which."""
    if names is not None or count != len(source.classes):
        return []
    first = ", ".join(source.classes[:3])
    return [f"the teacher has no class names: its {count} classes are taken in the order of the data's, {first} …"]


def choose_size(teacher: Teacher, recipe: Recipe) -> list[str]:
    """Set the size to which the teacher resizes the student's images; return a message if it is not the student's.

    A network keeps its accuracy on images up to twice as large as those it was trained on, and papers fine-tune students at 384
    with teachers of 224 pixels. On smaller images it loses accuracy, on much larger ones accuracy and time.
    """
    own, student = teacher.preprocessing.image_size, recipe.augmentation.image_size
    fits = all(usual <= side <= MAX_ENLARGEMENT * usual for side, usual in zip(student, own, strict=True))
    if teacher.size is not None or fits or recipe.distillation.teacher_size == "student":
        return []
    teacher.size = own
    return [f"images are resized for the teacher, from {format_size(student)} to {format_size(own)} pixels, its own size"]


def is_store(path: str) -> bool:
    return Path(path, MANIFEST).is_file()


def open_store(path: str, source: Source, content: str, outside: str = "spread", check: bool = True) -> tuple[LabelStore, Tensor]:
    """A label store with `content` ("logits" or "tokens") and the teacher's class of each of the student's classes.

    Without `check` only the manifest is read: no shard and no image.
    """
    store = LabelStore.open(path, check)
    if content not in store.outputs:
        raise UserError(f"{path} holds {' and '.join(store.outputs)}: annotate again with --outputs {content}.")
    if outside == "spread" and not store.has_rest(content):
        raise UserError(f"{path} does not hold the sum over the classes that it leaves out: set token_labels.outside=zero.")
    return store, match_classes(store, source, path)


class StoredPredictions:
    """The predictions of a label store for the images of a source, by image index."""

    def __init__(self, path: str, source: Source, device: torch.device, content: str, outside: str = "spread") -> None:
        store, index = open_store(path, source, content, outside)
        self.outside, self.index = outside, index.to(device)
        # By the teacher's class: the student's class, and one past the last for classes that the student does not have.
        self.student_class = torch.full((store.classes,), len(source.classes), device=device)
        self.student_class[self.index] = torch.arange(len(source.classes), device=device)
        self.rows, self.store = store.rows(source).to(device), store.to(device)
        self.covers = store.covers

    def logits(self, images: Tensor) -> Tensor:
        """[B, C]"""
        return self.store.class_scores(self.rows[images], self.index)

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The K largest logits of every cell and their classes, [B, K, h, w] each; every other class has the logit 0."""
        rows = self.rows[images]
        values, classes = self.store.tokens(rows)
        if self.outside == "spread":
            values = values - self.store.rest_logit("tokens", rows)[:, None]
        return values, self.student_class[classes]
