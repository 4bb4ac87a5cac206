"""Image classification from labels, with distillation (DeiT), token labels and MixToken (LV-ViT), and re-labelling."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vitrail.checkpoints.hub import find_named, is_built_by_timm, locate
from vitrail.data.datasets.lookup import check_trainable, check_usable
from vitrail.data.decode import decode
from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.rng import sample_key
from vitrail.data.source import Source, Splits
from vitrail.data.transforms.mixup import Mix, draw_mix, flip_groups, mix_images
from vitrail.data.transforms.pipeline import Augmented, augment, erase
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import count_hits, summarize
from vitrail.evaluation.confusion import class_metrics, collect_predictions, confusion, thumbnail, worst_mistakes
from vitrail.evaluation.features import POOLED
from vitrail.evaluation.statistics import standard_error
from vitrail.interpret.mistakes import draw_maps
from vitrail.models.vision_transformer import VisionTransformer, mix_tokens
from vitrail.recipes.schema import Recipe
from vitrail.tasks.distillation import distillation_loss, teacher_targets
from vitrail.tasks.losses import classification_loss
from vitrail.tasks.neighbor_validation import Gallery, collect_features, finer_columns, rate_levels
from vitrail.tasks.targets import ClassificationTargets, blend, label_targets
from vitrail.tasks.token_labels import covered, draw_token_mix, project, token_loss, token_mask
from vitrail.training.distributed import Devices
from vitrail.training.metrics import TOP1
from vitrail.training.task import Position, Task

if TYPE_CHECKING:
    from vitrail.tasks.teacher_labels import OnlineTeacher, StoredPredictions

KNN_K, KNN_IMAGES = 20, 20_000  # of the validation at finer labels: neighbors, training images at most
MAX_IMAGES_FOR_MISTAKES = 50_000  # a validation set above this is not searched for mistakes


class Classification(Task):
    """Class labels as targets; the recipe's `loss`, `mixing`, `distillation` and `token_labels` say how."""

    metric = TOP1
    shardable = True

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.online: OnlineTeacher | None = None
        self.stored: StoredPredictions | None = None
        self.maps: StoredPredictions | None = None
        self.gallery: Gallery | None = None
        if recipe.distillation.kind != "none":
            from vitrail.tasks.teacher_labels import is_store, open_online_teacher, open_store

            if is_store(recipe.distillation.teacher):
                open_store(recipe.distillation.teacher, source, "logits", check=False)
            else:
                self.online = open_online_teacher(recipe, source, device)
                self.teacher = self.online.teacher
                self.messages += self.online.messages
        if recipe.token_labels.store:
            from vitrail.tasks.teacher_labels import open_store

            open_store(recipe.token_labels.store, source, "tokens", recipe.token_labels.outside, check=False)

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        for name in recipe.task_options:
            raise UserError(f"task_options.{name} has no effect on training from labels: choose another recipe, or remove it.")
        return resolve_teacher(recipe, explicit)

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        return describe_targets(recipe)

    @classmethod
    def check_data(cls, recipe: Recipe, splits: Splits) -> None:
        check_usable(part for part in splits if part is not None)
        for part in (splits.train, splits.validation):
            check_trainable(part)
        if splits.validation.classes != splits.train.classes:
            raise UserError(f"{splits.train.name}: training and validation do not have the same classes.")
        for part in (splits.train, splits.validation):
            check_labels(part)

    @classmethod
    def dependencies(cls, recipe: Recipe) -> dict[str, str]:
        if recipe.distillation.kind == "none" and not recipe.token_labels.store:
            return {}
        from vitrail.tasks.teacher_labels import digests

        return digests(recipe)

    @property
    def class_names(self) -> list[str]:
        return list(self.source.classes)

    def attach(self, model: VisionTransformer) -> None:
        super().attach(model)
        recipe, source = self.recipe, self.source
        self.classes, self.grid, self.patch_size = model.architecture.classes, model.grid, model.architecture.patch_size
        if model.head_distillation is not None and not recipe.distillation.trains_second_head:
            self.messages.append(
                "the head of the distillation token is not trained: give --teacher, or set distillation.without_teacher=both"
            )
        if self.online is None and recipe.distillation.kind != "none" and self.stored is None:
            from vitrail.tasks.teacher_labels import StoredPredictions, class_order_message

            self.stored = StoredPredictions(recipe.distillation.teacher, source, self.device, "logits")
            self.messages += class_order_message(self.stored.store.class_names, self.stored.store.classes, source)
        if recipe.token_labels.store and self.maps is None:
            from vitrail.tasks.teacher_labels import StoredPredictions

            self.maps = StoredPredictions(recipe.token_labels.store, source, self.device, "tokens", recipe.token_labels.outside)

    def build_module(self, model: VisionTransformer) -> "ClassificationModule":
        return ClassificationModule(model, self.recipe)

    def initialize(self, model: VisionTransformer, loader: ImageLoader, batch_size: int) -> list[str]:
        if not self.recipe.init.probe_head:
            return []
        from vitrail.tasks.probe_head import fit_head

        return fit_head(model, loader, batch_size, self.recipe.seed)

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, ClassificationTargets]:
        """Augmented and mixed images [B, 3, height, width] and their targets."""
        recipe, epoch = self.recipe, position.epoch
        augmentation, mixing = recipe.augmentation, recipe.mixing
        keys = sample_key(recipe.seed, epoch, batch.index, batch.repeat)
        augmented = augment(batch.pixels, batch.sizes, keys, augmentation, erase=not mixing.erase_after)
        beta = (mixing.mixup, mixing.cutmix, mixing.switch_prob)
        mixes = [
            draw_mix(recipe.seed, epoch, position.step_in_epoch, group, augmentation.image_size, *beta)
            for group in position.groups
        ]
        images = mix_images(augmented.images, mixes)
        if mixing.erase_after:
            images = erase(images, keys, augmentation.random_erasing)
        return images, self.make_targets(batch, augmented, images, mixes, position)

    def make_targets(
        self, batch: Batch, augmented: Augmented, images: Tensor, mixes: Sequence[Mix], position: Position
    ) -> ClassificationTargets:
        """`augmented` are the images before mixing, `images` the mixed ones that student and teacher see."""
        recipe, config = self.recipe, self.recipe.token_labels
        assert batch.labels is not None
        classes, tokens, mixed = label_targets(batch.labels, self.classes, recipe.loss), None, None
        if self.maps is not None:
            values, ids = self.maps.tokens(batch.index)
            center = self.maps.covers == "center"
            logits = project(values, ids, augmented, self.grid, self.patch_size, self.classes, center, config.box_order)
            classes = self._image_target(classes, batch.labels, self._smooth(logits.mean(1).softmax(-1)))
            if config.weight:
                tokens = self._smooth(logits.softmax(-1))
        if tokens is not None and any(mix.lam < 1.0 for mix in mixes):
            part = torch.stack([covered(mix, self.grid, self.patch_size, self.device) for mix in mixes])
            part = part.repeat_interleave(len(tokens) // len(mixes), 0)[:, :, None]
            tokens = torch.lerp(tokens, flip_groups(tokens, len(mixes)), part)
        classes, teacher = blend(classes, mixes), self._teacher_target(batch, images, mixes)
        if config.mixtoken:
            place = (recipe.seed, position.epoch, position.step_in_epoch)
            drawn = [draw_token_mix(*place, group, self.grid, config.mixtoken) for group in position.groups]
            mixed = token_mask(drawn, self.grid, self.device)
            classes = blend(classes, drawn)
            teacher = None if teacher is None else blend(teacher, drawn)
            if tokens is not None and config.mixtoken_on == "labels":
                tokens = mix_tokens(tokens, mixed)
        return ClassificationTargets(classes, teacher, tokens, mixed)

    def run_teacher(self, images: Tensor) -> None:
        if self.online is not None:
            self.online.logits(images)

    def _teacher_target(self, batch: Batch, images: Tensor, mixes: Sequence[Mix]) -> Tensor | None:
        """The teacher's distribution [B, C]: predicted for the mixed images, or mixed from the stored predictions of each."""
        if self.online is not None:
            return teacher_targets(self.online.logits(images), self.recipe.distillation)
        if self.stored is not None:
            return blend(teacher_targets(self.stored.logits(batch.index), self.recipe.distillation), mixes)
        return None

    def _image_target(self, target: Tensor, labels: Tensor, from_map: Tensor) -> Tensor:
        """The target of the whole image; "blend" weighs the map by 0.5, and by 0.9 where it contradicts the label."""
        match self.recipe.token_labels.target:
            case "labels":
                return target
            case "relabel":
                return from_map
        agrees = from_map.argmax(1, keepdim=True) == labels[:, None]
        return torch.lerp(target, from_map, torch.where(agrees, 0.5, 0.9))

    def _smooth(self, targets: Tensor) -> Tensor:
        smoothing = self.recipe.loss.label_smoothing if self.classes > 1 else 0.0
        return targets * (1.0 - smoothing) + smoothing / self.classes if smoothing else targets

    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        hits = count_hits(model, loader, model.preprocessing, batch_size, devices.rank, devices.world_size)
        found = summarize(devices.all_reduce_sum(hits), model.architecture.classes)._asdict()
        values = {name: value for name, value in found.items() if value is not None}
        # Sharded weights are gathered by a call of the model alone.
        return values if hasattr(model, "reshard") else values | self._rate_finer_labels(model, loader, batch_size, devices)

    @torch.no_grad()
    def _rate_finer_labels(
        self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices
    ) -> dict[str, float]:
        """The k-NN accuracy of the features at label columns finer than the labels that are trained on."""
        columns = finer_columns(self.source)
        if not columns:
            return {}
        self.gallery = self.gallery or Gallery(self.source, self.device, self.recipe.min_decode_side, KNN_IMAGES)
        memory = self.gallery.open(len(loader.source))
        own, queries = (collect_features(model, POOLED, each, batch_size, devices, columns) for each in (memory, loader))
        return rate_levels(own, queries, self.source, columns, KNN_K)

    def is_better(self, values: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
        """The higher accuracy; of equal ones, which small validation sets often have, the lower loss. A NaN loss is worst.

        With `validation.select_by=loss` the lower loss; with `latest` all that are within one standard error of the best,
        unless the best are those at the start and the accuracy is not higher and the loss is.
        """
        score, highest = validation_score(values), validation_score(best)
        match self.recipe.validation.select_by:
            case "loss":
                return score[1:] > highest[1:]
            case "latest":
                if best.get("step") == 0 and score[0] <= highest[0] and score[1] < highest[1]:
                    return False  # no higher accuracy and a higher loss than the weights at the start
                return score[0] >= highest[0] - standard_error(highest[0], int(best["images"]))
        return score > highest

    def report(self, model: VisionTransformer, loader: ImageLoader, splits: Splits, batch_size: int) -> dict[str, Any]:
        """Confusion, accuracy per class and the most confident mistakes on the validation images."""
        source, names = splits.validation, splits.validation.classes
        if len(source) > MAX_IMAGES_FOR_MISTAKES:
            return {}
        predictions = collect_predictions(model, loader, model.preprocessing, batch_size)
        worst = worst_mistakes(predictions)
        maps = draw_maps(model, source, worst.image, worst.prediction, loader.log)
        mistakes = []
        for row, (index, label, prediction, confidence) in enumerate(zip(*worst, strict=True)):
            pixels = decode(source.encoded(int(index)), loader.min_side)
            mistakes.append(
                {
                    "image": thumbnail(pixels),
                    "location": source.location(int(index)),
                    "label": names[label],
                    "prediction": names[prediction],
                    "confidence": round(float(confidence), 6),
                    "map": maps[row],
                }
            )
        per_class = class_metrics(predictions, names)
        return {"confusion": confusion(predictions, names), "per_class": per_class, "mistakes": mistakes}

    def hint_for_nan(self) -> str:
        if self.recipe.distillation.kind != "none" or self.recipe.token_labels.store:
            return "The teacher's predictions may contain NaN; otherwise a lower optimizer.lr or a longer warmup often helps"
        return super().hint_for_nan()


class ClassificationModule(nn.Module):
    """A model and its loss as one module: this is what is compiled, replicated and sharded."""

    def __init__(self, model: VisionTransformer, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        if model.head_distillation is not None and not recipe.distillation.trains_second_head:
            model.head_distillation.requires_grad_(False)  # DDP waits for the gradient of every trainable parameter

    def forward(self, images: Tensor, targets: ClassificationTargets) -> Tensor:
        """Images [B, 3, height, width] to the loss."""
        recipe, out = self.recipe, self.model.outputs(images, targets.mixed)
        loss = classification_loss(out.main, targets.classes, recipe.loss)
        if targets.teacher is not None:
            weight, student = recipe.distillation.weight, out.main if out.distillation is None else out.distillation
            loss = (1 - weight) * loss + weight * distillation_loss(student, targets.teacher, recipe.distillation)
        elif out.distillation is not None and recipe.distillation.trains_second_head:  # no teacher: two class tokens
            loss = (loss + classification_loss(out.distillation, targets.classes, recipe.loss)) / 2
        if targets.tokens is not None:
            assert out.dense is not None
            dense = out.dense
            if targets.mixed is not None and recipe.token_labels.mixtoken_on == "predictions":
                dense = mix_tokens(dense, targets.mixed)
            loss = loss + recipe.token_labels.weight * token_loss(dense, targets.tokens)
        return loss


def random_targets(model: VisionTransformer, recipe: Recipe, device: torch.device, images: int) -> ClassificationTargets:
    """Uniform distributions in the shapes of the recipe's targets, to measure a step without data."""
    classes, patches = model.architecture.classes, model.grid[0] * model.grid[1]
    uniform = torch.full((images, classes), 1.0 / classes, device=device)
    teacher = uniform if recipe.distillation.kind != "none" else None
    tokens = uniform[:, None].expand(-1, patches, -1).contiguous() if recipe.token_labels.weight else None
    mixed = torch.zeros(1, patches, dtype=torch.bool, device=device) if recipe.token_labels.mixtoken else None
    return ClassificationTargets(uniform, teacher, tokens, mixed)


def validation_score(values: Mapping[str, Any]) -> tuple[float, float]:
    loss = float(values["loss"])  # text if it has been stored as JSON and is NaN
    return (-1.0, -math.inf) if math.isnan(loss) else (values["top1"], -loss)


def check_labels(source: Source) -> None:
    assert source.label is not None
    missing = int((source.label.values < 0).sum())
    if missing:
        raise UserError(f"{source.name}: {missing} of {len(source)} images have no label: remove them or add labels.")
    highest = int(source.label.values.max())
    if highest >= len(source.classes):
        raise UserError(f"{source.name} has the label {highest} but {len(source.classes)} classes: fix the labels.")


def resolve_teacher(recipe: Recipe, explicit: frozenset[str] = frozenset()) -> Recipe:
    """The recipe with absolute paths of its teacher and label store; an error if one is needed and missing.

    A teacher or a store that no other key mentions is used in the usual way; keys in `explicit` keep their values.
    """
    distillation, tokens, architecture = recipe.distillation, recipe.token_labels, dict(recipe.architecture)
    if distillation.kind != "none" and not distillation.teacher:
        raise UserError(f"{recipe.name} needs a teacher: give --teacher, a network or a label store made by vitrail annotate.")
    if distillation.kind == "none" and distillation.teacher and "distillation.kind" not in explicit:
        distillation = dataclasses.replace(distillation, kind="hard")
    if distillation.kind != "none" and distillation.weight == 0:
        raise UserError("distillation.weight=0 gives the teacher no effect: remove the teacher, or give a weight up to 1.")
    if not tokens.store and (tokens.weight > 0 or tokens.target != "labels"):
        raise UserError(f"{recipe.name} needs token labels: give --labels, a label store made by vitrail annotate.")
    if tokens.store and tokens.weight == 0 and tokens.target == "labels":
        weight = 0.0 if "token_labels.weight" in explicit else 0.5
        target: Literal["labels", "relabel"] = "labels" if "token_labels.target" in explicit else "relabel"
        tokens = dataclasses.replace(tokens, weight=weight, target=target)
    if tokens.weight > 0:
        architecture["dense_head"] = True
    teacher, store = (os.path.expanduser(path) for path in (distillation.teacher, tokens.store))
    teacher = teacher if is_built_by_timm(teacher) else locate(teacher)
    store = os.path.abspath(store) if store and os.path.exists(store) else store  # a run can be resumed from another directory
    if teacher or store:
        check_paths(teacher, store)
    return dataclasses.replace(
        recipe,
        architecture=architecture,
        distillation=dataclasses.replace(distillation, teacher=teacher),
        token_labels=dataclasses.replace(tokens, store=store),
    )


def check_paths(teacher: str, store: str) -> None:
    from vitrail.teachers.label_store import read_manifest
    from vitrail.teachers.sidecar import read_sidecar, sidecar_path

    if teacher and not is_built_by_timm(teacher) and not os.path.exists(find_named(teacher) or teacher):
        raise UserError(
            f"There is no teacher at {teacher}: give a network's file, a name such as deit3_small, timm:NAME, or a label "
            "store made by vitrail annotate."
        )
    if teacher.endswith((".pt2", ".onnx")) and "preprocessing" not in read_sidecar(teacher):
        raise UserError(
            f"{teacher} has no preprocessing: write it to {sidecar_path(teacher)}, or run vitrail annotate --preprocessing once "
            "and give --teacher that label store."
        )
    if store:
        read_manifest(Path(store))


def describe_targets(recipe: Recipe) -> list[str]:
    """Messages on what is learned besides the labels."""
    distillation, tokens, messages = recipe.distillation, recipe.token_labels, []
    if distillation.kind != "none":
        messages.append(f"{distillation.weight:g} of the loss is {distillation.kind} distillation from {distillation.teacher}")
    elif distillation.teacher:
        messages.append(f"the teacher {distillation.teacher} is not used: distillation.kind is none")
    if tokens.store:
        mixed = ", MixToken" if tokens.mixtoken else ""
        messages.append(f"token labels from {tokens.store} with weight {tokens.weight:g}, image target: {tokens.target}{mixed}")
    return messages
