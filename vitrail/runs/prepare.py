"""From what the user asked for to a model at its start: the recipe, the data, the weights, the division of the batch."""

import dataclasses
import datetime
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vitrail.checkpoints import load
from vitrail.checkpoints.bundled import find_bundled
from vitrail.checkpoints.model_io import split_path
from vitrail.checkpoints.readers import BEST
from vitrail.checkpoints.training_checkpoints import is_state
from vitrail.data.datasets.lookup import check_trainable, open_splits
from vitrail.data.sampler import Order
from vitrail.data.source import Source, Splits
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.formatting import pace as per_second
from vitrail.formatting import percent, size
from vitrail.models.config import TRAINING_ONLY, Architecture, show_size
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build as build_model
from vitrail.models.registry import create, list_models
from vitrail.models.registry import lookup as find_model
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe, lookup
from vitrail.recipes.data_defaults import fit, usual_side
from vitrail.recipes.duration import told
from vitrail.runs.memory import Plan, enough_memory
from vitrail.runs.step_timing import Pace
from vitrail.teachers.label_store import read_manifest
from vitrail.teachers.sidecar import file_beside, read_beside
from vitrail.training.distributed import Devices, cut
from vitrail.training.schedules import span_steps, total_steps
from vitrail.training.scope import apply_scope
from vitrail.training.trainer import Options

# Parts in which a training may differ from the weights it starts from, because they are made anew or resampled.
RENEWED = {"classes", "pre_logits", "patch_size", "image_size", "dense_head", "dense_weight"}
# What comes with a distillation token, which weights without one are given.
TOKEN = ("distillation", "distillation_head", "fusion")


def resolve(recipe: str | Recipe | None, model: str | None, changes: dict[str, Any] | None, device: str) -> Recipe:
    """The recipe that was asked for, with the changes in it; without a name the one that suits the device."""
    if recipe is None:
        recipe = "small" if device == "cuda" else "laptop"
        if changes and changes.get("init.weights"):
            recipe = "finetune"
    resolved = lookup(recipe) if isinstance(recipe, str) else recipe
    resolved = resolved.set((changes or {}) | ({"model": model} if model else {}))
    if resolved.lr == 0:
        raise UserError("optimizer.lr=0 never changes a weight: give a rate above 0.")
    weights = located(os.path.expanduser(resolved.init.weights))
    resolved = dataclasses.replace(resolved, init=dataclasses.replace(resolved.init, weights=weights))
    if resolved.init.scope != "full" and not weights:
        raise UserError(f"init.scope={resolved.init.scope} would leave most of a network at random: give --from WEIGHTS.")
    resolved = with_teacher(resolved, frozenset(changes or {}))
    if resolved.init.pretrained_recipe and not weights:
        raise UserError(
            f"{resolved.name} starts from trained weights, such as those of {resolved.init.pretrained_recipe}: "
            "give --from WEIGHTS."
        )
    return resolved


def with_teacher(recipe: Recipe, said: frozenset[str] = frozenset()) -> Recipe:
    """The recipe with its teacher and its labels of patches where they lie; refused if one is needed and not there.

    A teacher or labels that no other leaf speaks of are used in the usual way; leaves that the user has `said` stay.
    """
    distillation, tokens, changes = recipe.distillation, recipe.token_labels, dict(recipe.architecture)
    if distillation.kind != "none" and not distillation.teacher:
        raise UserError(f"{recipe.name} learns from a teacher: give --teacher, a network or a store made by vitrail annotate.")
    if distillation.kind == "none" and distillation.teacher and "distillation.kind" not in said:
        distillation = dataclasses.replace(distillation, kind="hard")
    if distillation.kind != "none" and distillation.weight == 0:
        raise UserError("distillation.weight=0 asks a teacher for nothing: leave the teacher out, or give it a weight up to 1.")
    if not tokens.store and (tokens.weight > 0 or tokens.target != "labels"):
        raise UserError(f"{recipe.name} learns labels of patches: give --labels, a store made by vitrail annotate.")
    if tokens.store and tokens.weight == 0 and tokens.target == "labels":
        weight = 0.0 if "token_labels.weight" in said else 0.5
        tokens = dataclasses.replace(tokens, weight=weight, target="labels" if "token_labels.target" in said else "relabel")
    if tokens.weight > 0:
        changes["dense_head"] = True
    teacher, labels = (place(os.path.expanduser(path)) for path in (distillation.teacher, tokens.store))
    # Said here and not after the images have been decoded.
    if teacher and not teacher.startswith("timm:") and not os.path.exists(find_bundled(teacher) or teacher):
        raise UserError(
            f"There is no teacher at {teacher}: give a network's file, timm:NAME or a store made by vitrail annotate."
        )
    if teacher.endswith((".pt2", ".onnx")) and "preprocessing" not in read_beside(teacher):
        raise UserError(
            f"{teacher} does not say how its images are prepared: say it in {file_beside(teacher)}, or ask it once with "
            "vitrail annotate --preprocessing and give --teacher that store."
        )
    if labels:
        read_manifest(Path(labels))
    return dataclasses.replace(
        recipe,
        architecture=changes,
        distillation=dataclasses.replace(distillation, teacher=teacher),
        token_labels=dataclasses.replace(tokens, store=labels),
    )


def taught(recipe: Recipe) -> list[str]:
    """Sentences on who teaches."""
    distillation, tokens, said = recipe.distillation, recipe.token_labels, []
    if distillation.kind != "none":
        said.append(f"{distillation.weight:g} of the loss is {distillation.kind} distillation from {distillation.teacher}")
    elif distillation.teacher:
        said.append(f"{distillation.teacher} is not asked: distillation.kind is none")
    if tokens.store:
        mixed = ", MixToken" if tokens.mixtoken else ""
        said.append(f"labels of patches from {tokens.store} with weight {tokens.weight:g}, of images: {tokens.target}{mixed}")
    return said


def place(path: str) -> str:
    return os.path.abspath(path) if path and os.path.exists(path) else path


def located(weights: str) -> str:
    """Where the weights lie, whichever folder a run is resumed from; the folder of a run stands for its best weights."""
    if not weights:  # none are wanted, also where one stands in the folder of a run
        return ""
    base, delta = split_path(weights)
    if delta is not None:
        return f"{located(str(base))}+{os.path.abspath(delta)}"
    if os.path.isfile(os.path.join(weights, BEST)):
        weights = os.path.join(weights, BEST)
    return place(weights)


def look_at(source: str, recipe: Recipe, model: str | None = None) -> tuple[Splits, Recipe, VisionTransformer | None, list[str]]:
    """Open the data and the weights to start from, refuse what cannot be learned from, fit the recipe to them.

    `model` is what the user asked for beside the recipe, if anything. The last of the results are sentences on what was found.
    """
    splits = open_splits(source, held_out=recipe.data.validation_fraction)
    check_splits(source, splits)
    trained = open_weights(recipe, model) if recipe.init.weights else None
    if trained and model is not None:
        recipe = with_token(recipe, trained, find_model(model)[1])
    if trained and trained.name in list_models():
        recipe = dataclasses.replace(recipe, model=trained.name)
    recipe, said = fit(recipe, splits.train, trained.preprocessing if trained else None)
    said += taught(recipe)
    steps = steps_of(recipe, splits.train)
    if total_steps(recipe.schedule, steps) < 1:
        raise UserError(
            f"schedule.length={recipe.schedule.length!r} is less than one step, of which an epoch has {steps:,}: give more."
        )
    counts = f"{len(splits.train):,} training and {len(splits.validation):,} validation images"
    said = [f"{splits.train.name}: {counts}, {len(splits.train.classes)} classes", *said]
    if recipe.data.repeats > 1 or recipe.data.round_to > 1:
        epoch = order_of(recipe, splits.train).accounting()
        said.append(f"an epoch is {epoch.steps:,} steps, {epoch.samples:,} samples of {epoch.distinct:,} images")
    said += told(recipe.schedule)
    if trained:
        head = "a new" if is_new_classifier(trained, recipe, splits.train.classes) else "its own"
        size = show_size(trained.architecture.image_size)
        said.append(f"starting from {recipe.init.weights}: {trained.name or 'a model'} at {size} pixels, with {head} classifier")
        if gains_token(trained, recipe):
            stays = "" if recipe.init.scope == "full" else f"; init.scope={recipe.init.scope} leaves the token as it starts"
            said.append(
                "these weights have no distillation token: the token, its position and its classifier are new and start as in a "
                f"training from scratch, everything else is loaded{stays}"
            )
    return splits, recipe, trained, said


def check_splits(source: str, splits: Splits) -> None:
    for part in (splits.train, splits.validation):
        check_trainable(part)
    if splits.validation.classes != splits.train.classes:
        raise UserError(f"{source}: training and validation do not have the same classes.")
    for part in (splits.train, splits.validation):
        check_labels(part)
        usual_side(part)  # complains if no image can be read


def check_labels(part: Source) -> None:
    assert part.label is not None
    unknown = int((part.label.values < 0).sum())
    if unknown:
        raise UserError(f"{part.name}: {unknown} of {len(part)} images have no label: remove them or give them one.")
    highest = int(part.label.values.max())
    if highest >= len(part.classes):
        raise UserError(f"{part.name} has the label {highest} but {len(part.classes)} classes: mend the labels.")


def steps_of(recipe: Recipe, source: Source) -> int:
    """Of an epoch."""
    return order_of(recipe, source).steps


def order_of(recipe: Recipe, source: Source) -> Order:
    return Order(len(source), recipe.batch_size, repeats=recipe.data.repeats, round_to=recipe.data.round_to)


def build(recipe: Recipe, source: Source, trained: VisionTransformer | None = None) -> VisionTransformer:
    """The model at its start, the same on every machine; `trained` is what `open_weights` gave, if that was done already."""
    torch.manual_seed(recipe.seed)
    classes = source.classes
    with enough_memory():
        if recipe.init.weights:
            model, fresh = adapted(trained or open_weights(recipe), recipe, classes)
        else:
            model, fresh = create(recipe.model, len(classes), recipe.augmentation.image_size, **recipe.architecture), True
    if fresh and recipe.init.head_bias and isinstance(getattr(model.head, "bias", None), torch.nn.Parameter):
        torch.nn.init.constant_(model.head.bias, recipe.init.head_bias)  # type: ignore[arg-type]
    return dressed(model, recipe, source)


def rebuild(facts: dict[str, Any], recipe: Recipe, source: Source) -> VisionTransformer:
    """The model of a run that has a state to go on from: the weights that it started from need not be there any more."""
    if "architecture" not in facts:
        return build(recipe, source)
    architecture = Architecture.from_dict(facts["architecture"])
    return dressed(build_model(architecture, str(facts.get("model", {}).get("name", ""))), recipe, source)


def dressed(model: VisionTransformer, recipe: Recipe, source: Source) -> VisionTransformer:
    """The model with what it needs to be trained and used: scope, preprocessing, class names."""
    apply_scope(model, recipe.init.scope)
    testing, how = recipe.validation, recipe.augmentation
    model.preprocessing = Preprocessing(
        how.image_size, testing.crop_ratio, testing.resize, testing.interpolation, how.mean, how.std
    )
    test_view(model.preprocessing)  # complains here about a view that cannot be, not at the first validation
    model.class_names = list(source.classes)
    return model


def open_weights(recipe: Recipe, model: str | None = None) -> VisionTransformer:
    """The trained model that the recipe starts from; refused if it is not what the recipe's changes, or `model`, ask for."""
    weights = recipe.init.weights
    training = {field: value for field, value in recipe.architecture.items() if field in TRAINING_ONLY}
    others = {field: value for field, value in recipe.architecture.items() if field not in TRAINING_ONLY | RENEWED}
    # A file of another kind may be silent about a part and needs to be told; of a distillation token it never is.
    silent = {field: value for field, value in others.items() if field != "distillation"}
    trained = load(weights, **(training if is_artifact(weights) else training | silent))
    found = trained.architecture
    wanted = found.replace(**others)
    if model is not None:
        wanted = find_model(model)[1].replace(**recipe.architecture, classes=found.classes, image_size=found.image_size)
    added = TOKEN if wanted.distillation and not found.distillation else ()
    different = [field for field in found.differences(wanted) if field not in RENEWED and field not in added]
    if different:
        field = different[0]
        raise UserError(
            f"{weights} has {field}={getattr(found, field)}, and {getattr(wanted, field)} is asked for: "
            "leave that out, or start from other weights."
        )
    return trained


def gains_token(trained: VisionTransformer, recipe: Recipe) -> bool:
    """Whether the recipe wants a distillation token that the weights do not have."""
    return bool(recipe.architecture.get("distillation")) and not trained.architecture.distillation


def with_token(recipe: Recipe, trained: VisionTransformer, asked: Architecture) -> Recipe:
    """The recipe with the distillation token of the model that was asked for beside it, where the weights have none: a run that
    is resumed knows the recipe alone.
    """
    if not asked.distillation or trained.architecture.distillation:
        return recipe
    parts = {field: getattr(asked, field) for field in TOKEN} | recipe.architecture
    return dataclasses.replace(recipe, architecture=parts)


def is_artifact(path: str) -> bool:
    """Whether the file says itself what it is; of base and delta, whether the base does."""
    base, delta = split_path(path)
    if delta is not None:
        return is_artifact(str(base))
    if is_state(path):
        return True
    try:
        with safe_open(find_bundled(path) or path, "pt") as file:
            return "vitrail" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def adapted(trained: VisionTransformer, recipe: Recipe, classes: list[str]) -> tuple[VisionTransformer, bool]:
    """A trained model at the recipe's size and for these classes, and whether its classifier is a new one."""
    changes = {field: value for field, value in recipe.architecture.items() if field in RENEWED | TRAINING_ONLY}
    trained.resize(*recipe.augmentation.image_size, patch_size=changes.pop("patch_size", None))
    after = trained.architecture.replace(**changes | {"classes": len(classes), "image_size": trained.architecture.image_size})
    fresh, token = is_new_classifier(trained, recipe, classes), gains_token(trained, recipe)
    if token:
        after = after.replace(**{field: recipe.architecture[field] for field in TOKEN if field in recipe.architecture})
    if not fresh and not token and after.dense_head == trained.architecture.dense_head:
        return trained, False
    model = build_model(after, trained.name)
    state, lost = model.state_dict(), ("head", "pre_logits") if fresh else ()
    # Queries of one class each belong to the classifier too, which their shape tells.
    kept = {
        name: tensor
        for name, tensor in trained.state_dict().items()
        if not name.startswith(lost) and name in state and state[name].shape == tensor.shape
    }
    if token:  # its rows follow those of the class token
        for name, tensor in trained.state_dict().items():
            if name.startswith(("prefix", "pooling.queries", "pos_embed.")) and len(state[name]) == len(tensor) + 1:
                kept[name] = torch.cat([tensor[:1], state[name][1:2], tensor[1:]])
    model.load_state_dict(state | kept)
    for name, parameter in model.named_parameters():
        # Labels of whole images do not train a dense head, which in evaluation would add what it started with.
        if name not in kept and name.startswith("head" if recipe.init.zero_head else "head_dense"):
            torch.nn.init.zeros_(parameter)
    return model, fresh


def is_new_classifier(trained: VisionTransformer, recipe: Recipe, classes: list[str]) -> bool:
    """Whether the classifier of the weights is of no use: it is not wanted, knows other classes, or reads something else."""
    known, a = trained.class_names, trained.architecture
    others = known != classes if known is not None else a.classes != len(classes)
    return recipe.init.zero_head or others or recipe.architecture.get("pre_logits", a.pre_logits) != a.pre_logits


def check_numbers(micro_batch_size: int | None, workers: int | None, options: Options | None = None) -> None:
    """Complain about what no training can do before anything is computed."""
    for low, value, sentence in (
        (1, micro_batch_size, "micro_batch is the number of images at a time: at least 1."),
        (0, workers, "workers is the number of processes that decode: 0 or more."),
        (0, options.save_steps if options else None, "save_steps is a number of steps: 0 or more."),
        (0, options.log_steps if options else None, "log_steps is a number of steps: 0 or more."),
        (1, options.keep if options else None, "keep is the number of states that stay: at least 1."),
        (0, options.save_seconds if options else None, "save_seconds is a time: 0 or more."),
    ):
        if value is not None and value < low:
            raise UserError(sentence)


def unseen(model: VisionTransformer) -> list[str]:
    """A sentence on pixels that no patch covers, if there are any: legal, as in papers, and rarely meant."""
    size, patch = model.architecture.image_size, model.architecture.patch_size
    lost = [side - cells * patch for side, cells in zip(size, model.grid, strict=True)]
    if max(lost) <= 0:
        return []
    return [f"{show_size(size)} pixels are not a multiple of the patch size {patch}: the last {max(lost)} are not seen"]


def divide(devices: Devices, recipe: Recipe, plan: Plan, micro_batch_size: int | None) -> Devices:
    """The units of the global batch, as large as memory allows or as the user says."""
    # Processes see different amounts of free memory and must cut alike: the least counts.
    plan = dataclasses.replace(plan, largest=int(-devices.all_reduce_max([-plan.largest])[0]))
    wanted = micro_batch_size or plan.largest
    if wanted < 1:
        plan.check(1)
    micro_batches = cut(recipe.batch_size, devices.world_size, wanted)
    plan.check(recipe.batch_size // micro_batches)
    return dataclasses.replace(devices, micro_batches=micro_batches)


def forecast(plan: Plan, pace: Pace, recipe: Recipe, devices: Devices, source: Source, options: Options, times: int = 1) -> str:
    """Steps, time and memory in a sentence; of so many trainings one after the other."""
    epoch = steps_of(recipe, source)
    steps = total_steps(recipe.schedule, epoch)
    validating = validations(recipe, epoch, steps) * pace.looking
    seconds = pace.step * steps + validating
    span = datetime.timedelta(seconds=round(seconds * times))
    memory, rate = plan.memory(recipe.batch_size // devices.micro_batches), per_second(recipe.batch_size / pace.step)
    return (
        f"{steps:,} steps{f' for each of {times} seeds' if times > 1 else ''}, about {span} at {rate} images/s"
        f"{' before compiling' if options.compile else ''}"
        + (f", {percent(validating / seconds)} of it validation" if validating >= 0.005 * seconds else "")
        + f"; {size(memory)} of {size(plan.free)}"
        + (f"; {percent(pace.asking / pace.step)} of a step and {size(plan.teacher)} are the teacher's" if plan.teacher else "")
    )


def validations(recipe: Recipe, epoch: int, steps: int) -> int:
    """How many a training has: one every so often, and one at its end."""
    return math.ceil(steps / max(span_steps(recipe.validation.every, epoch, steps), 1))
