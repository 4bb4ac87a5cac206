"""What takes part: our models by name or file, and timm's beside them where it has the same."""

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.bench.settings import Setting
from vitrail.checkpoints import load
from vitrail.errors import UserError
from vitrail.models.config import Architecture
from vitrail.models.flops import Cost, cost
from vitrail.models.registry import build, lookup, name_of
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.lookup import recipes
from vitrail.recipes.schema import LossConfig, Recipe
from vitrail.runs.prepare import located
from vitrail.tasks.classification import Supervised
from vitrail.tasks.losses import classification_loss
from vitrail.tasks.targets import Targets
from vitrail.training.compile import for_compiling

DEPTHS = ("drop_path", "drop_path_schedule", "drop_path_kind")  # what a recipe says about stochastic depth
TIMM = {  # where adding the size to our name does not give timm's
    "resmlp_s12": "resmlp_12",
    "resmlp_s24": "resmlp_24",
    "resmlp_s36": "resmlp_36",
    "resmlp_b24_patch8": "resmlp_big_24",
    "patchconvnet_s60": "S60",  # the authors', where their code has registered it
}
ALIKE = 0.01  # share of the parameters by which two models that count as the same may differ


@dataclass(frozen=True)
class Contender:
    """One of those that are compared. Weights do not matter to the speed: every network starts anew, as its architecture says."""

    name: str  # as the user gave it
    project: str  # vitrail or timm
    architecture: Architecture  # ours, also of timm's
    recipe: Recipe
    foreign: str = ""  # timm's name

    def at(self, setting: Setting) -> Architecture:
        changes: dict[str, Any] = {"image_size": setting.size or self.architecture.image_size}
        if setting.depth:
            changes["depth"] = setting.depth
        return self.architecture.replace(**changes)

    def network(self, setting: Setting, device: torch.device) -> nn.Module:
        """A fresh network on the device."""
        architecture = self.at(setting)
        if self.project == "vitrail":
            network = build(architecture, self.name, device)
            compiled = setting.task == "train" and setting.mode != "eager"
            return for_compiling(network) if compiled else network
        # Made on the host first: timm's way of spacing its rates reads numbers, which a device context would break.
        return make_timm(self.foreign, architecture, bool(setting.depth)).to(device)

    def task(self, network: nn.Module) -> nn.Module:
        """Images and targets to the loss."""
        if isinstance(network, VisionTransformer):
            return Supervised(network, self.recipe)
        return Judged(network, self.recipe.loss)


class Judged(nn.Module):
    """A network of any origin and the loss of its answers."""

    def __init__(self, network: nn.Module, objective: LossConfig) -> None:
        super().__init__()
        self.network, self.objective = network, objective

    def forward(self, images: Tensor, targets: Targets) -> Tensor:
        return classification_loss(self.network(images), targets.classes, self.objective)


def open_contender(name: str, is_file: bool = False) -> Contender:
    """A model by its name, or the architecture of a checkpoint or of a run's best weights."""
    if is_file:
        model = load(located(name))
        architecture, known = model.architecture, model.name
    else:
        known, architecture = lookup(name)
    recipe = own_recipe(known, architecture)
    changes = {field: value for field, value in recipe.architecture.items() if field in DEPTHS}
    return Contender(name, "vitrail", architecture.replace(**changes), recipe)


def own_recipe(name: str, architecture: Architecture) -> Recipe:
    """The paper's plainest training of a model from scratch: its loss and its stochastic depth. A plain one if there is none.

    Plainest is the shortest name: the others add a length, a size or a teacher. A dense head wants labels of patches, a
    distillation token a teacher.
    """
    dense, taught = architecture.dense_head, architecture.distillation
    found = [
        recipe
        for recipe in recipes().values()
        if recipe.model == name
        and not recipe.init.pretrained_recipe
        and recipe.about.paper
        and (recipe.token_labels.weight > 0) == dense
        and (recipe.distillation.kind != "none") == taught
    ]
    if found:
        return min(found, key=lambda recipe: len(recipe.name))
    return Recipe(architecture={field: getattr(architecture, field) for field in DEPTHS})


def price(contender: Contender, setting: Setting) -> Cost:
    """Parameters and multiply-adds; complains about a size or a depth that cannot be."""
    return cost(dataclasses.replace(contender.at(setting), drop_path=0.0))


def opponents(contenders: Sequence[Contender]) -> tuple[list[Contender], list[str]]:
    """timm's model beside each of ours, and a sentence for each that it has none for."""
    timm, found, said = import_timm(), [], []
    for contender in contenders:
        name = timm_name(timm, contender)
        if name is None:
            said.append(f"timm has no model like {contender.name}.")
            continue
        network = make_timm(name, contender.architecture, False)
        theirs = sum(parameter.numel() for parameter in network.parameters())
        ours = cost(dataclasses.replace(contender.architecture, drop_path=0.0)).parameters
        if abs(theirs - ours) > ALIKE * ours:
            said.append(f"timm's {name} has {theirs:,} parameters and {contender.name} {ours:,}: they are not compared.")
            continue
        found.append(dataclasses.replace(contender, project="timm", foreign=name))
    return found, said


def import_timm(otherwise: str = "leave --against out") -> ModuleType:
    """`otherwise`: what to do where it cannot be had."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name == "timm":
            raise UserError(f"timm is not installed: install it with `pip install timm`, or {otherwise}.") from None
        raise UserError(f"timm cannot be imported here ({error}): mend it, or {otherwise}.") from None
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"timm cannot be imported here ({reason}): mend it, or {otherwise}.") from None


def timm_name(timm: ModuleType, contender: Contender) -> str | None:
    """timm's name of the same architecture: ours with a size in it. Which size is no matter, it is set anew."""
    try:
        plain, known = lookup(contender.name)
    except UserError:  # a file
        plain = name_of(contender.architecture)
        if not plain:
            return None
        known = lookup(plain)[1]
    base = TIMM.get(plain, plain.removesuffix("_ls"))
    sides = dict.fromkeys((known.image_size[0], 224, 384, 448))
    names = (base, *(f"{base}_{side}" for side in sides))
    return next((name for name in names if timm.is_model(name)), None)


def make_timm(name: str, architecture: Architecture, other_depth: bool) -> nn.Module:
    """timm's model with our size, classes and stochastic depth, and without the LayerScale of deep ViTs where ours has none."""
    timm = import_timm()
    wanted: dict[str, Any] = {
        "img_size": architecture.image_size,
        "num_classes": architecture.classes,
        "in_chans": architecture.channels,
        "drop_path_rate": architecture.drop_path,
    }
    if other_depth:
        wanted["num_blocks" if name.startswith("resmlp") else "depth"] = architecture.depth
    if name.startswith("vit_") and architecture.residual == "plain":
        wanted["init_values"] = 0.0  # timm drops a None and keeps the model's own
    return timm.create_model(name, pretrained=False, **wanted)
