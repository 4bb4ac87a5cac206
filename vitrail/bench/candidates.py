"""Models to benchmark: ours by name, those of files, and timm's counterparts."""

import copy
import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bench.settings import Setting
from vitrail.errors import UserError
from vitrail.evaluation.model import open_model
from vitrail.layers.fused import optimize_for_training
from vitrail.models.config import Architecture
from vitrail.models.flops import Cost, cost
from vitrail.models.registry import build, lookup, name_of
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.lookup import lookup as lookup_recipe
from vitrail.recipes.lookup import summaries
from vitrail.recipes.schema import LossConfig, Recipe
from vitrail.runs.initial_model import locate_weights
from vitrail.tasks.classification import ClassificationModule
from vitrail.tasks.losses import classification_loss
from vitrail.tasks.targets import ClassificationTargets
from vitrail.teachers.network import ConvNetwork, ModuleNetwork, TransformerNetwork
from vitrail.teachers.teacher import Teacher

DEPTHS = ("drop_path", "drop_path_schedule", "drop_path_kind")  # stochastic depth in a recipe
TIMM = {  # names that differ in more than the image size
    "resmlp_s12": "resmlp_12",
    "resmlp_s24": "resmlp_24",
    "resmlp_s36": "resmlp_36",
    "resmlp_b24_patch8": "resmlp_big_24",
    "patchconvnet_s60": "S60",
}
REGISTERED = ("S60", "lvvit_t", "lvvit_s", "lvvit_m")  # the authors' models, if their code has registered them with timm
MAX_DIFFERENCE = 0.01  # relative difference of the numbers of parameters of two models that count as the same


class NetworkShape(NamedTuple):
    """What a benchmark needs of the architecture of a network that is not a vision transformer of Vitrail."""

    image_size: tuple[int, int]
    classes: int
    channels: int = 3
    depth: int = 0  # which cannot be changed
    patch_size: int = 32  # image sizes of a curve are multiples of it

    def replace(self, **changes: Any) -> "NetworkShape":
        return self._replace(**changes)


@dataclass(frozen=True)
class Candidate:
    """A model to benchmark. It is created with random weights, which do not change the speed."""

    name: str  # as given by the user
    project: str  # vitrail or timm
    architecture: Architecture  # ours, also for timm's model
    recipe: Recipe
    timm_model: str = ""  # its name in timm
    configuration: str = ""  # of timm's model in the mode native, one of `settings.CONFIGURATIONS`

    def at(self, setting: Setting) -> Architecture:
        """The architecture with the image size and depth of a setting."""
        changes: dict[str, Any] = {"image_size": setting.size or self.architecture.image_size}
        if setting.depth:
            if not self.architecture.depth:
                raise UserError(f"The depth of {self.name} cannot be changed: remove --depth.")
            changes["depth"] = setting.depth
        return self.architecture.replace(**changes)

    def network(self, setting: Setting, device: torch.device) -> nn.Module:
        """A new network on the device."""
        architecture = self.at(setting)
        if self.project == "vitrail":
            network = build(architecture, self.name, device)
            compiled = setting.task == "train" and setting.mode != "eager"
            return optimize_for_training(network) if compiled else network
        # Created on the CPU first: timm reads its drop-path rates with .item(), which a device context would break.
        return make_timm(self.timm_model, architecture, bool(setting.depth)).to(device)

    def task(self, network: nn.Module) -> nn.Module:
        """A module from images and targets to the loss."""
        if isinstance(network, VisionTransformer):
            return ClassificationModule(network, self.recipe)
        return WithLoss(network, self.recipe.loss)

    def cost(self, setting: Setting) -> Cost:
        """Parameters and multiply-adds; rejects an impossible size or depth."""
        return cost(dataclasses.replace(self.at(setting), drop_path=0.0))


@dataclass(frozen=True, kw_only=True)
class NetworkCandidate(Candidate):
    """A network of a file that is not a vision transformer of Vitrail."""

    architecture: NetworkShape  # type: ignore[assignment]
    module: nn.Module

    def at(self, setting: Setting) -> NetworkShape:  # type: ignore[override]
        if setting.depth:
            raise UserError(f"The depth of {self.name} cannot be changed: remove --depth.")
        return self.architecture.replace(image_size=setting.size or self.architecture.image_size)

    def network(self, setting: Setting, device: torch.device) -> nn.Module:
        return copy.deepcopy(self.module).requires_grad_().to(device)

    def cost(self, setting: Setting) -> Cost:
        shape, module, kept = self.at(setting), copy.deepcopy(self.module).requires_grad_().to("meta"), [0]

        def count(tensor: Tensor) -> Tensor:
            kept[0] += tensor.nbytes
            return tensor

        image = torch.empty(1, shape.channels, *shape.image_size, device="meta")
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            module(image)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        macs = counter.get_total_flops() // 2
        return Cost(shape.image_size, 0, parameters, macs, macs, max(kept[0] - 4 * parameters, 0))


class WithLoss(nn.Module):
    """A network of another library with the classification loss of its logits, and of dense logits if it returns some."""

    def __init__(self, network: nn.Module, loss: LossConfig) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, images: Tensor, targets: ClassificationTargets) -> Tensor:
        outputs = self.network(images)
        logits, dense = outputs[:2] if isinstance(outputs, tuple) else (outputs, None)
        loss = classification_loss(logits, targets.classes, self.loss)
        if dense is None:
            return loss
        return loss + F.cross_entropy(dense.flatten(0, 1), targets.classes.repeat_interleave(dense.shape[1], 0))


def open_candidate(name: str, is_file: bool = False) -> Candidate:
    """A model by its name, or by a checkpoint of any kind or run directory with its architecture."""
    if is_file:
        model = open_model(locate_weights(name), "cpu")
        if isinstance(model, Teacher) and isinstance(model.network, TransformerNetwork):
            model = model.network.model
        if isinstance(model, Teacher):
            return open_network(name, model)
        architecture, model_name = model.architecture, model.name
    else:
        model_name, architecture = lookup(name)
    recipe = find_recipe(model_name, architecture)
    changes = {field: value for field, value in recipe.architecture.items() if field in DEPTHS}
    return Candidate(name, "vitrail", architecture.replace(**changes), recipe)


def open_network(name: str, teacher: Teacher) -> Candidate:
    if not isinstance(teacher.network, ConvNetwork | ModuleNetwork):
        raise UserError(f"{name} contains a program, whose speed depends on where it was exported: give weights instead.")
    module = teacher.network.model if isinstance(teacher.network, ConvNetwork) else teacher.network.module
    shape = NetworkShape(teacher.size or teacher.preprocessing.image_size, teacher.classes)
    return NetworkCandidate(name, "vitrail", recipe=Recipe(), architecture=shape, module=module)


def find_recipe(name: str, architecture: Architecture) -> Recipe:
    """The recipe that trains the model from scratch, for its loss and stochastic depth; a plain recipe if there is none.

    Of several recipes, the one with the shortest name is the base: the others add a length, an image size or a teacher. A dense
    head needs token labels, a distillation token a teacher.
    """
    names = [
        each
        for each, summary in summaries().items()
        if summary.model == name
        and summary.paper
        and not summary.pretrained_recipe
        and (summary.distillation != "none") == architecture.distillation
    ]
    for recipe in map(lookup_recipe, sorted(names, key=len)):
        if (recipe.token_labels.weight > 0) == architecture.dense_head:
            return recipe
    return Recipe(architecture={field: getattr(architecture, field) for field in DEPTHS})


def timm_candidates(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
    """timm's counterpart of each candidate, and a message for each candidate without one."""
    timm, counterparts, messages = import_timm(), [], []
    for candidate in candidates:
        name = timm_name(timm, candidate)
        if name is None:
            messages.append(f"timm has no counterpart of {candidate.name}.")
            continue
        network = make_timm(name, candidate.architecture, False)
        theirs = sum(parameter.numel() for parameter in network.parameters())
        ours = candidate.cost(Setting()).parameters
        if abs(theirs - ours) > MAX_DIFFERENCE * ours:
            messages.append(f"timm's {name} has {theirs:,} parameters, {candidate.name} has {ours:,}: they are not compared.")
            continue
        counterparts.append(dataclasses.replace(candidate, project="timm", timm_model=name))
    return counterparts, messages


def import_timm(alternative: str = "remove --against") -> ModuleType:
    """Import timm; `alternative` is the advice in the message if it is not available."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name == "timm":
            raise UserError(f"timm is not installed: install it with `pip install timm`, or {alternative}.") from None
        raise UserError(f"timm cannot be imported here ({error}): fix the installation, or {alternative}.") from None
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"timm cannot be imported here ({reason}): fix the installation, or {alternative}.") from None


def timm_name(timm: ModuleType, candidate: Candidate) -> str | None:
    """timm's name of the same architecture: ours followed by an image size, which is changed afterwards."""
    if isinstance(candidate, NetworkCandidate):
        return None
    try:
        name, registered = lookup(candidate.name)
    except UserError:  # a file
        name = name_of(candidate.architecture)
        if not name:
            return None
        registered = lookup(name)[1]
    base = TIMM.get(name, name.removesuffix("_ls"))
    sides = dict.fromkeys((registered.image_size[0], 224, 384, 448))
    names = (base, *(f"{base}_{side}" for side in sides))
    return next((name for name in names if timm.is_model(name)), None)


def make_timm(name: str, architecture: Architecture, other_depth: bool) -> nn.Module:
    """timm's model with our image size, classes and stochastic depth; without LayerScale if ours has none."""
    timm = import_timm()
    options: dict[str, Any] = {
        **({} if architecture.convnet else {"img_size": architecture.image_size}),  # convnets have no argument for it
        "num_classes": architecture.classes,
        "in_chans": architecture.channels,
        "drop_path_rate": architecture.drop_path,
    }
    if other_depth:
        options["num_blocks" if name.startswith("resmlp") else "depth"] = architecture.depth
    if name.startswith("vit_") and architecture.residual == "plain":
        options["init_values"] = 0.0  # timm drops a None and keeps the model's own
    model: Any
    if name in REGISTERED:  # the authors' functions do not take all arguments that `create_model` adds
        model = timm.model_entrypoint(name)(pretrained=False, **options)
        if hasattr(model, "mix_token"):  # LV-ViT: boxes drawn on the host could not be compiled; our batch is not mixed either
            model.mix_token = False
    else:
        model = timm.create_model(name, pretrained=False, **options)
    network: nn.Module = model
    return network
