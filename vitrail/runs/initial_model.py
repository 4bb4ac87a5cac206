"""The model at the start of a training: newly initialized, or from pre-trained weights at another size and with other classes."""

import dataclasses
import os

import torch
from safetensors import SafetensorError, safe_open

from vitrail.checkpoints import load
from vitrail.checkpoints.hub import find_named, locate
from vitrail.checkpoints.model_io import split_delta_path
from vitrail.checkpoints.readers import BEST
from vitrail.checkpoints.training_checkpoints import is_training_checkpoint
from vitrail.errors import UserError
from vitrail.layers.pos_embed import RELATIVE
from vitrail.models.config import TRAINING_ONLY, Architecture
from vitrail.models.inputs import has_fixed_grid
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build as build_model
from vitrail.models.registry import create
from vitrail.models.registry import lookup as find_model
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.runs.memory import explain_out_of_memory
from vitrail.tasks.registry import find_task
from vitrail.training.scope import apply_scope

# Fields in which a training may differ from its pre-trained weights, because they are initialized anew or resampled.
REPLACED = {"classes", "pre_logits", "pre_logits_kind", "patch_size", "image_size", "dense_head", "dense_weight"}
# Fields in which BEiT's fine-tuning differs from its pre-training, see `can_restructure`.
RESTRUCTURED = ("pooling", "pool_norm", "keep_class_token", "pos_embed_place")
# Fields in which a model with one query per class differs from one with a single query, see `adds_class_queries`.
CLASS_QUERIES = ("pooling", "pooling_keys")
# The fields of a distillation token, which is added to weights without one.
DISTILLATION_TOKEN = ("distillation", "distillation_head", "fusion")


def build_initial(recipe: Recipe, class_names: list[str] | None, pretrained: VisionTransformer | None) -> VisionTransformer:
    """The model at step 0, the same on every machine. `pretrained` is what `open_pretrained` returned."""
    torch.manual_seed(recipe.seed)
    with explain_out_of_memory():
        if pretrained is not None:
            model, new_head = adapt(pretrained, recipe, class_names)
        else:
            size = recipe.augmentation.image_size
            model, new_head = create(recipe.model, len(class_names or ()), size, **recipe.architecture), True
    if new_head and recipe.init.head_bias and isinstance(getattr(model.head, "bias", None), torch.nn.Parameter):
        torch.nn.init.constant_(model.head.bias, recipe.init.head_bias)  # type: ignore[arg-type]
    return configure(model, recipe, class_names)


def rebuild(architecture: Architecture, name: str, recipe: Recipe, class_names: list[str] | None) -> VisionTransformer:
    """The model of a run that has a checkpoint: its pre-trained weights are not needed any more."""
    return configure(build_model(architecture, name), recipe, class_names)


def configure(model: VisionTransformer, recipe: Recipe, class_names: list[str] | None) -> VisionTransformer:
    """Set scope, preprocessing and class names."""
    apply_scope(model, recipe.init.scope)
    view, augmentation = recipe.validation, recipe.augmentation
    model.preprocessing = Preprocessing(
        recipe.validation_size, view.crop_ratio, view.resize, view.interpolation, augmentation.mean, augmentation.std
    )
    if recipe.validation_size != augmentation.image_size and has_fixed_grid(model.architecture):
        raise UserError(f"{model.name} has weights for each patch and takes one image size only: remove validation.image_size.")
    model.preprocessing.check()  # raises for an invalid view now and not at the first validation
    model.class_names = None if class_names is None else list(class_names)
    return model


def locate_weights(weights: str) -> str:
    """The absolute path of weights, so that a run can be resumed from another directory; a run directory stands for its best."""
    if not weights:
        return ""
    base, delta = split_delta_path(weights)
    if delta is not None:
        return f"{locate_weights(str(base))}+{os.path.abspath(delta)}"
    if os.path.isfile(os.path.join(weights, BEST)):
        weights = os.path.join(weights, BEST)
    return locate(weights)


def open_pretrained(recipe: Recipe, model: str | None = None) -> VisionTransformer:
    """The model of `init.weights`; an error if it differs from what the recipe, or `model`, requires."""
    weights = recipe.init.weights
    training = {field: value for field, value in recipe.architecture.items() if field in TRAINING_ONLY}
    others = {field: value for field, value in recipe.architecture.items() if field not in TRAINING_ONLY | REPLACED}
    # Files of other formats leave some fields open, which the recipe then sets; a distillation token is never left open.
    converted = CLASS_QUERIES if others.get("pooling") == "per_class" else ()
    unstated = {field: value for field, value in others.items() if field not in ("distillation", *converted)}
    pretrained = load(weights, **(training if states_architecture(weights) else training | unstated))
    found = pretrained.architecture
    wanted = found.replace(**others)
    if model is not None:
        wanted = find_model(model)[1].replace(**recipe.architecture, classes=found.classes, image_size=found.image_size)
    added = {*DISTILLATION_TOKEN} if wanted.distillation and not found.distillation else set()
    added |= {*RESTRUCTURED} if can_restructure(found, wanted) else set()
    added |= {*CLASS_QUERIES} if adds_class_queries(found, wanted) else set()
    different = [field for field in found.differences(wanted) if field not in REPLACED and field not in added]
    if different:
        field = max(different, key=lambda name: getattr(found, name) != getattr(wanted, name))  # not one that is just unused
        raise UserError(
            f"{weights} has {field}={getattr(found, field)}, but {field}={getattr(wanted, field)} was requested: remove that "
            "setting, or start from other weights."
        )
    return pretrained


def can_restructure(found: Architecture, wanted: Architecture) -> bool:
    """Whether weights can be used with other pooling and positions, as BEiT is fine-tuned.

    The patch tokens are averaged before a new norm, and the class token stays in the blocks; the relative bias that all blocks
    share is copied to each of them.
    """
    same_pooling = (found.pooling, found.keep_class_token) == (wanted.pooling, wanted.keep_class_token)
    to_mean = found.pooling == "class" and wanted.keep_class_token and not found.distillation
    same_place, to_layers = found.pos_embed_place == wanted.pos_embed_place, wanted.pos_embed_place == "layers"
    copied = found.pos_embed in RELATIVE and found.pos_embed_place == "shared" and to_layers
    return (same_pooling or to_mean) and (same_place or copied) and found.pool_norm <= wanted.pool_norm


def adds_class_queries(found: Architecture, wanted: Architecture) -> bool:
    """Whether a model with one query becomes one with a query per class, as PatchConvNet is fine-tuned.

    Every class starts with the query and its row of the classifier: without a key of the query itself (`pooling_keys="patches"`),
    the predictions are the same.
    """
    single = found.pooling == "class_attention" and not found.distillation and not found.dense_head and not found.pre_logits
    return single and wanted.pooling == "per_class"


def is_restructured(pretrained: VisionTransformer, recipe: Recipe) -> bool:
    """Whether the recipe changes the pooling or the positions of the weights."""
    found = pretrained.architecture
    return any(recipe.architecture.get(field, getattr(found, field)) != getattr(found, field) for field in RESTRUCTURED)


def adds_token(pretrained: VisionTransformer, recipe: Recipe) -> bool:
    """Whether the recipe adds a distillation token that the weights do not have."""
    return bool(recipe.architecture.get("distillation")) and not pretrained.architecture.distillation


def with_token(recipe: Recipe, pretrained: VisionTransformer, requested: Architecture) -> Recipe:
    """The recipe with the distillation token of the requested model, if the weights have none.

    Resuming reads the recipe alone.
    """
    if not requested.distillation or pretrained.architecture.distillation:
        return recipe
    fields = {field: getattr(requested, field) for field in DISTILLATION_TOKEN} | recipe.architecture
    return dataclasses.replace(recipe, architecture=fields)


def states_architecture(path: str) -> bool:
    """Whether a file contains its architecture; of base and delta, whether the base does."""
    base, delta = split_delta_path(path)
    if delta is not None:
        return states_architecture(str(base))
    if is_training_checkpoint(path):
        return True
    weights = find_named(path) or path
    if not os.path.isfile(weights):
        return False
    try:
        with safe_open(weights, "pt") as file:
            return "vitrail" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def adapt(pretrained: VisionTransformer, recipe: Recipe, class_names: list[str] | None) -> tuple[VisionTransformer, bool]:
    """A pre-trained model at the recipe's size and for these classes, and whether its classifier is new."""
    changed = REPLACED | TRAINING_ONLY | set(RESTRUCTURED) | set(CLASS_QUERIES)
    changes = {field: value for field, value in recipe.architecture.items() if field in changed}
    if not find_task(recipe.task).keeps_head:
        pretrained.task_head = None
    pretrained.resize(*recipe.augmentation.image_size, patch_size=changes.pop("patch_size", None))
    before = pretrained.architecture
    after = before.replace(**changes | {"classes": len(class_names or ()), "image_size": before.image_size})
    new_head, token = needs_new_classifier(pretrained, recipe, class_names), adds_token(pretrained, recipe)
    restructured = is_restructured(pretrained, recipe)
    if token:
        after = after.replace(
            **{field: recipe.architecture[field] for field in DISTILLATION_TOKEN if field in recipe.architecture}
        )
    if not new_head and not token and not restructured and after.dense_head == before.dense_head:
        return pretrained, False
    model = build_model(after, pretrained.name)
    state = model.state_dict()
    dropped = (*(("head", "pre_logits") if new_head else ()), *(("norm.",) if after.pool_norm > before.pool_norm else ()))
    # Per-class queries belong to the classifier too; their shape changes with the number of classes.
    kept = {
        name: tensor
        for name, tensor in pretrained.state_dict().items()
        if not name.startswith(dropped) and name in state and state[name].shape == tensor.shape
    }
    if token:  # its rows follow those of the class token
        for name, tensor in pretrained.state_dict().items():
            if name.startswith(("prefix", "pooling.queries", "pos_embed.")) and len(state[name]) == len(tensor) + 1:
                kept[name] = torch.cat([tensor[:1], state[name][1:2], tensor[1:]])
    if adds_class_queries(before, after):
        assert pretrained.pooling is not None
        kept["pooling.queries"] = pretrained.pooling.queries.expand(after.classes, -1).clone()
    if after.pos_embed_place != before.pos_embed_place:
        kept |= {name: pretrained.pos_embed[0].table for name in state if name.startswith("pos_embed.")}
    model.load_state_dict(state | kept)
    # A head that is not trained would add its initial values to the predictions; image labels do not train a dense head.
    untrained = ("head_dense",) if recipe.distillation.trains_second_head else ("head_dense", "head_distillation")
    for name, parameter in model.named_parameters():
        if name not in kept and name.startswith("head" if recipe.init.zero_head else untrained):
            torch.nn.init.zeros_(parameter)
    return model, new_head


def needs_new_classifier(pretrained: VisionTransformer, recipe: Recipe, class_names: list[str] | None) -> bool:
    """Whether the classifier of the weights cannot be kept: unwanted, for other classes, or on other features."""
    known, a = pretrained.class_names, pretrained.architecture
    others = known != class_names if known is not None else a.classes != len(class_names or ())
    to_queries = a.pooling == "class_attention" and recipe.architecture.get("pooling") == "per_class"
    others = others or (is_restructured(pretrained, recipe) and not to_queries)
    return recipe.init.zero_head or others or recipe.architecture.get("pre_logits", a.pre_logits) != a.pre_logits
