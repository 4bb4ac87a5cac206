"""From a batch to what the network should say about it: the data's labels, what a teacher says, labels of patches."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.source import Source
from vitrail.data.transforms.mixup import Mix
from vitrail.data.transforms.pipeline import Augmented
from vitrail.errors import UserError
from vitrail.evaluation.class_matching import imagenet
from vitrail.models.config import show_size
from vitrail.models.vision_transformer import VisionTransformer, mix_tokens
from vitrail.recipes.schema import Recipe
from vitrail.tasks.distillation import teacher_targets
from vitrail.tasks.targets import Targets, blend, label_targets
from vitrail.tasks.token_labels import covered, draw_token_mix, project, token_mask
from vitrail.teachers.class_index import match_data
from vitrail.teachers.fixed_shape import first_line
from vitrail.teachers.label_store import MANIFEST, Store
from vitrail.teachers.lookup import open_teacher
from vitrail.teachers.sidecar import file_beside
from vitrail.teachers.teacher import Teacher

RENAME = "give the data's classes the teacher's names, or their WordNet ids in wordnet_ids.json beside the data"


def identities(recipe: Recipe) -> dict[str, str]:
    """By path, a digest of each file that a training learns from; of a store that of its list of shards, which has theirs."""
    found = {}
    paths = (recipe.distillation.teacher if recipe.distillation.kind != "none" else "", recipe.token_labels.store)
    for path in filter(os.path.exists, filter(None, paths)):
        files = [os.path.join(path, name) for name in (MANIFEST, "best.safetensors", "model.safetensors", "pytorch_model.bin")]
        file = next(filter(os.path.isfile, [path, *files]), None)
        if file is not None:
            found[path] = digest(file)
        if os.path.isfile(file_beside(path)):
            found[str(file_beside(path))] = digest(file_beside(path))
    return found


def digest(file: str | Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@dataclass(frozen=True)
class Asked:
    """A network that is asked at every step."""

    teacher: Teacher
    index: Tensor  # int64 [student's classes]: which of the teacher's each is
    said: list[str]  # what a person should know about it


def open_asked(recipe: Recipe, source: Source, device: torch.device) -> Asked | None:
    """The network that a recipe asks at every step, if it asks one; refused if it cannot answer about the student's images."""
    path = recipe.distillation.teacher
    if recipe.distillation.kind == "none" or is_store(path):
        return None
    teacher = open_teacher(path, device)
    index = matched(teacher, source, path).to(device)
    try_out(teacher, recipe, device)
    return Asked(teacher, index, in_order(teacher.class_names, teacher.classes, source) + at_another_size(teacher, recipe))


def try_out(teacher: Teacher, recipe: Recipe, device: torch.device) -> None:
    """Ask about an empty image of the student's size."""
    how, path = recipe.augmentation, recipe.distillation.teacher
    try:
        answer = teacher(torch.zeros(1, len(how.mean), *how.image_size, device=device), how.mean, how.std)
    except Exception as error:  # a stranger's network may raise anything
        (height, width), why = how.image_size, first_line(error).rstrip(".")
        raise UserError(
            f"The teacher {path} fails on the student's images of {height} x {width} ({why}): take another, or ask it once, at "
            "its own size, with vitrail annotate."
        ) from None
    if not bool(answer.isfinite().all()):
        raise UserError(f"The teacher {path} answers with what is not a number: its weights are damaged, take others.")


def check_stores(recipe: Recipe, source: Source) -> None:
    """Complain about stores that cannot teach, by what they say of themselves: no shard and no image is read."""
    if recipe.distillation.kind != "none" and is_store(recipe.distillation.teacher):
        open_store(recipe.distillation.teacher, source, "logits", check=False)
    if recipe.token_labels.store:
        open_store(recipe.token_labels.store, source, "tokens", recipe.token_labels.outside, check=False)


class Guide:
    """Opens the recipe's teacher and stores once; `targets` is asked for every unit and waits for nothing."""

    def __init__(
        self, recipe: Recipe, model: VisionTransformer, source: Source, device: torch.device, asked: Asked | None = None
    ) -> None:
        """`asked` is what `open_asked` gave, if that was done already."""
        self.recipe, self.device = recipe, device
        self.classes, self.grid, self.patch = model.architecture.classes, model.grid, model.architecture.patch_size
        self.teacher = self.answers = self.maps = None
        self.said: list[str] = []  # what a person should know about it
        asked = asked or open_asked(recipe, source, device)
        if asked is not None:
            self.teacher, self.index, self.said = asked.teacher, asked.index, asked.said
        elif recipe.distillation.kind != "none":
            self.answers = Answers(recipe.distillation.teacher, source, device, "logits")
            self.said = in_order(self.answers.store.class_names, self.answers.store.classes, source)
        if recipe.token_labels.store:
            self.maps = Answers(recipe.token_labels.store, source, device, "tokens", recipe.token_labels.outside)

    def targets(
        self, batch: Batch, seen: Augmented, images: Tensor, mix: Mix, epoch: int, step: int, micro_batch: int
    ) -> Targets:
        """`seen` is what the augmentation gave, `images` what mixing made of it: what the network and its teacher see."""
        recipe = self.recipe
        assert batch.labels is not None
        classes, tokens, mixed = label_targets(batch.labels, self.classes, recipe.loss), None, None
        if self.maps is not None:
            values, whose = self.maps.tokens(batch.index)
            logits = project(values, whose, seen, self.grid, self.patch, self.classes, self.maps.covers == "centre")
            classes = self._own(classes, batch.labels, self._smooth(logits.mean(1).softmax(-1)))
            if recipe.token_labels.weight:
                tokens = self._smooth(logits.softmax(-1))
        if tokens is not None and mix.share < 1.0:
            part = covered(mix, self.grid, self.patch, self.device)
            tokens = torch.lerp(tokens, tokens.flip(0), part[None, :, None])
        classes, teacher = blend(classes, mix.share), self._taught(batch, images, mix)
        if recipe.token_labels.mixtoken:
            drawn = draw_token_mix(recipe.seed, epoch, step, micro_batch, self.grid, recipe.token_labels.mixtoken)
            mixed = token_mask(drawn, self.grid, self.device)
            classes = blend(classes, drawn.share)
            teacher = None if teacher is None else blend(teacher, drawn.share)
            if tokens is not None and recipe.token_labels.mixtoken_on == "labels":
                tokens = mix_tokens(tokens, mixed)
        return Targets(classes, teacher, tokens, mixed)

    def _taught(self, batch: Batch, images: Tensor, mix: Mix) -> Tensor | None:
        """The teacher's distribution [B, C]: of the mixed images themselves, or mixed from what a store knows of each."""
        how, seen = self.recipe.distillation, self.recipe.augmentation
        if self.teacher is not None:
            return teacher_targets(self.teacher(images, seen.mean, seen.std)[:, self.index], how)
        if self.answers is not None:
            return blend(teacher_targets(self.answers.logits(batch.index), how), mix.share)
        return None

    def _own(self, truth: Tensor, labels: Tensor, found: Tensor) -> Tensor:
        """The label of the whole image; "blend" trusts the map half, and more where it contradicts the data."""
        match self.recipe.token_labels.target:
            case "labels":
                return truth
            case "relabel":
                return found
        agrees = found.argmax(1, keepdim=True) == labels[:, None]
        return torch.lerp(truth, found, torch.where(agrees, 0.5, 0.9))

    def _smooth(self, targets: Tensor) -> Tensor:
        smoothing = self.recipe.loss.label_smoothing if self.classes > 1 else 0.0
        return targets * (1.0 - smoothing) + smoothing / self.classes if smoothing else targets


def matched(teacher: Teacher | Store, source: Source, path: str) -> Tensor:
    """int64 [student's classes]: which of the teacher's each is."""
    advice = RENAME
    if teacher.class_names is None and teacher.classes != len(imagenet()):
        again = isinstance(teacher, Store) or not os.path.exists(path)
        advice = f"name the teacher's {'with vitrail annotate --classes' if again else f'in {file_beside(path)}'}"
    return match_data(teacher, source, advice, "the student").numbers


def in_order(names: list[str] | None, count: int, source: Source) -> list[str]:
    """A sentence if nothing but the order says which class is which."""
    if names is not None or count != len(source.classes):
        return []
    first = ", ".join(source.classes[:3])
    return [f"the teacher does not name its {count} classes: they are taken in the order of the data's, {first} …"]


def at_another_size(teacher: Teacher, recipe: Recipe) -> list[str]:
    """A sentence if the student's images are smaller or larger than the teacher was made for, and it sees them so."""
    own, student, path = teacher.preprocessing.image_size, recipe.augmentation.image_size, recipe.distillation.teacher
    if teacher.size is not None or own == student:
        return []
    made = f"the teacher was made for images of {show_size(own)} pixels and sees the student's of {show_size(student)}"
    larger = all(side >= usual for side, usual in zip(student, own, strict=True))
    advice = "ask it once, at its own size, with vitrail annotate, and give that store"
    if larger and os.path.exists(path):
        advice = f'write {{"size": {own[0] if own[0] == own[1] else list(own)}}} into {file_beside(path)}'
    return [f"{made}, of which it may know less{' and which take longer' if larger else ''}: {advice}"]


def is_store(path: str) -> bool:
    return Path(path, MANIFEST).is_file()


def open_store(path: str, source: Source, what: str, outside: str = "spread", check: bool = True) -> tuple[Store, Tensor]:
    """A store and which of its teacher's classes the student's are; refused if it does not keep `what` is asked for."""
    store = Store.open(path, check)
    if what not in store.what:
        raise UserError(f"{path} keeps {' and '.join(store.what)}: annotate again with --what {what}.")
    if outside == "spread" and not store.knows_rest(what):
        raise UserError(f"{path} does not know what lies outside the classes it keeps: set token_labels.outside=zero.")
    return store, matched(store, source, path)


class Answers:
    """What a store says about the images of a source, by their numbers."""

    def __init__(self, path: str, source: Source, device: torch.device, what: str, outside: str = "spread") -> None:
        store, index = open_store(path, source, what, outside)
        self.outside, self.index = outside, index.to(device)
        # Of the teacher's classes: the student's number, one too high for those that the student does not have.
        self.own = torch.full((store.classes,), len(source.classes), device=device)
        self.own[self.index] = torch.arange(len(source.classes), device=device)
        self.rows, self.store = store.rows(source).to(device), store.to(device)
        self.covers = store.covers

    def logits(self, images: Tensor) -> Tensor:
        """[B, C]"""
        return self.store.class_scores(self.rows[images], self.index)

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The K best logits of every cell and their classes, [B, K, h, w] each; a logit of 0 is that of every other class."""
        rows = self.rows[images]
        values, classes = self.store.tokens(rows)
        if self.outside == "spread":
            values = values - self.store.outside("tokens", rows)[:, None]
        return values, self.own[classes]
