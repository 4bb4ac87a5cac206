"""Settings of the tasks: the keys and defaults of a recipe's `task_options`. Importable without torch."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from vitrail.errors import UserError
from vitrail.recipes.schema import Recipe, build_group

Options = TypeVar("Options")  # a dataclass
DURATIONS = ("freeze_last_layer", "teacher_temperature_warmup")  # of DINO


@dataclass(frozen=True)
class SelfSupervisedOptions:
    """Settings of all tasks that learn without labels."""

    knn_k: int = 20  # neighbors of the k-NN accuracy, where there are labels
    knn_images: int = 20_000  # training images among which neighbors are searched, at most
    on_collapse: Literal["warn", "stop"] = "warn"

    def __post_init__(self) -> None:
        if self.knn_k < 1 or self.knn_images < 1:
            raise UserError("task_options.knn_k and knn_images are numbers of images: at least 1.")


@dataclass(frozen=True)
class DinoOptions(SelfSupervisedOptions):
    """Self-distillation between views (DINO). Durations in epochs may be fractions.

    The recipe's augmentation is that of the first global view; the others differ in what is named here.
    """

    second_blur: float = 0.1  # of the second global view
    second_solarize: float = 0.2
    local_crops: int = 8
    local_size: int = 0  # pixels of a side; 0: 3/7 of the image size
    local_scale: tuple[float, float] = (0.05, 0.4)  # share of the image's area
    local_blur: float = 0.5
    # Local crops of a network with weights of a fixed grid (ResMLP): enlarged to its size, left out, or at their own size with
    # interpolated weights. Other networks take them at their own size.
    fixed_grid: Literal["resize", "none", "interpolate"] = "resize"
    outputs: int = 65_536
    hidden: int = 2048
    bottleneck: int = 256
    head_layers: int = 3
    norm_last_layer: bool = True  # the gains of the last layer are fixed to 1
    freeze_last_layer: float = 1.0  # epochs in which the last layer is not trained
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    teacher_temperature_start: float = 0.04
    teacher_temperature_warmup: float = 30.0  # epochs
    center_momentum: float = 0.9  # 1: no centering
    momentum: float = 0.996  # of the teacher at the start; it grows to 1 along a cosine
    weight_decay_end: float = 0.4  # at the last step, along a cosine from optimizer.weight_decay
    clip_grad: float = 3.0  # largest gradient norm of each parameter; 0: none
    patch_weight: float = 0.0  # of iBOT's loss on masked patches of the global views; 1 in its paper
    masked: float = 0.3  # share of the patches that is masked for it, in every other view

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("outputs", "hidden", "bottleneck", "head_layers"):
            if getattr(self, name) < 1:
                raise UserError(f"task_options.{name}={getattr(self, name)} is out of range: give at least 1.")
        for name in ("student_temperature", "teacher_temperature", "teacher_temperature_start"):
            if getattr(self, name) <= 0:
                raise UserError(f"task_options.{name}={getattr(self, name):g} is out of range: give a number above 0.")
        for name in ("second_blur", "second_solarize", "local_blur", "center_momentum", "momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"task_options.{name}={getattr(self, name):g} is out of range: give a number from 0 to 1.")
        for name in ("local_crops", "local_size", *DURATIONS, "weight_decay_end", "clip_grad"):
            if getattr(self, name) < 0:
                raise UserError(f"task_options.{name}={getattr(self, name):g} is out of range: give 0 or more.")
        if self.patch_weight < 0 or not 0 < self.masked < 1:
            raise UserError(
                "task_options.patch_weight is 0 or more, task_options.masked a share of the patches: above 0, below 1."
            )
        low, high = self.local_scale
        if not 0 < low <= high <= 1:
            raise UserError(f"task_options.local_scale=[{low:g}, {high:g}] should be two shares of the area, the smaller first.")


@dataclass(frozen=True)
class GrafitOptions(SelfSupervisedOptions):
    """Grafit and the methods that it is compared with: a weighted sum of losses on labels and on views of an image."""

    neighbor_weight: float = 1.0  # of the k-NN loss on the labels, among the embeddings of all training images
    class_weight: float = 0.0  # of the cross-entropy of a linear classifier of the labels
    instance_weight: float = 1.0  # of the loss between views of an image and those of an EMA target network
    triplet_weight: float = 0.0  # of the triplet loss between two views of an image and those of others
    views: int = 4  # of every image, for the instance and the triplet loss
    shared_view: bool = False  # the view with labels is one of `views`, not a further one
    projector: Literal["mlp", "linear", "none"] = "mlp"  # whose output is compared and searched; none: the pooled vector
    outputs: int = 256  # of the projector
    hidden: int = 4096  # of projector and predictor
    temperature: float = 0.05  # of the k-NN loss
    margin: float = 0.0  # of the k-NN loss, subtracted from the logits of the own class
    triplet_margin: float = 0.2
    momentum: float = 0.996  # of the target network at the first step
    momentum_end: float = 1.0  # at the last step, along a cosine
    memory_momentum: float = 0.5  # share of the old embedding when the memory is updated
    normalize_memory: bool = True  # after every update
    memory_init: Literal["random", "features"] = "random"  # features: one pass over the training images with the initial weights
    clusters: int = 0  # labels are replaced by so many clusters of the features of `clusters_from` (ClusterFit); 0: not
    clusters_from: str = ""  # weights

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.neighbor_weight, self.class_weight, self.instance_weight, self.triplet_weight)
        if min(weights) < 0 or not any(weights):
            raise UserError("task_options has four weights of losses: give 0 or more, and at least one above 0.")
        if self.views < 2 and (self.instance_weight or self.triplet_weight):
            raise UserError(f"task_options.views={self.views}: views are compared in pairs, give at least 2.")
        for name in ("views", "outputs", "hidden", "temperature"):
            if getattr(self, name) <= 0:
                raise UserError(f"task_options.{name}={getattr(self, name):g} is out of range: give a number above 0.")
        for name in ("momentum", "momentum_end", "memory_momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"task_options.{name}={getattr(self, name):g} is out of range: give a number from 0 to 1.")
        if self.triplet_margin < 0 or self.margin < 0:
            raise UserError("task_options.margin and triplet_margin are at least 0.")
        if self.projector != "none" and not (self.neighbor_weight or self.instance_weight or self.triplet_weight):
            raise UserError("task_options.projector has no effect on the class loss alone: set it to none.")
        if self.clusters == 1 or self.clusters < 0:
            raise UserError(f"task_options.clusters={self.clusters}: give at least 2, or 0 to train on labels.")

    @property
    def shares_view(self) -> bool:
        """Whether the view with labels is one of `views`; always where no loss reads labels."""
        return self.shared_view or not (self.neighbor_weight or self.class_weight)


@dataclass(frozen=True)
class MaskedPatchOptions(SelfSupervisedOptions):
    """Masked patch prediction of ViT: a share of the patch embeddings is corrupted, their content is predicted."""

    # What is predicted: the mean color of the patch or the colors of its 4 x 4 parts, in 512 classes, or all pixels.
    target: Literal["mean_color", "downsized", "pixels"] = "mean_color"
    corrupted: float = 0.5  # share of the patches
    masked: float = 0.8  # share of the corrupted patches that is replaced by the mask token
    replaced: float = 0.1  # share that is replaced by other patches of the image; the rest is left as it is

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.corrupted < 1:
            raise UserError(f"task_options.corrupted={self.corrupted:g} is a share of the patches: above 0 and below 1.")
        if self.masked <= 0 or self.replaced < 0 or self.masked + self.replaced > 1 + 1e-9:
            raise UserError(
                f"task_options.masked={self.masked:g} and replaced={self.replaced:g} are shares of the corrupted patches: masked "
                "must be above 0, replaced at least 0, and both together at most 1."
            )


@dataclass(frozen=True)
class BeitOptions(SelfSupervisedOptions):
    """BEiT: predict the codes that a tokenizer gives to masked patches."""

    tokenizer: str = ""  # the weights of `vitrail tokenizer train`
    masked: float = 75 / 196  # share of the patches, at most
    min_block: float = 16 / 196  # smallest block, as a share of the patches
    aspect: float = 0.3  # smallest aspect ratio of a block; the largest is its inverse
    # before_stem: the pixels of masked patches are set to the mean before the stem, too, whose patches must not overlap
    mask_place: Literal["after_stem", "before_stem"] = "after_stem"
    # The loss is the mean over images of the mean over their masked patches; "batch", as in the authors' code: the mean over all
    # masked patches of a micro-batch, which depends slightly on how the batch is divided.
    average: Literal["image", "batch"] = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masked < 1:
            raise UserError(f"task_options.masked={self.masked:g} is a share of the patches: give more than 0 and less than 1.")
        if not 0 <= self.min_block <= self.masked:
            raise UserError(
                f"task_options.min_block={self.min_block:g} is larger than the masked share of the patches ({self.masked:g}): "
                "give a smaller one."
                if self.min_block > 0
                else f"task_options.min_block={self.min_block:g} is a share of the patches: give 0 or more."
            )
        if not 0 < self.aspect <= 1:
            raise UserError(f"task_options.aspect={self.aspect:g} is the smallest aspect ratio: give more than 0 and at most 1.")


@dataclass(frozen=True)
class TokenizerOptions(SelfSupervisedOptions):
    """A discrete autoencoder whose codes BEiT predicts."""

    codes: int = 8192
    width: int = 256  # of the code vectors and of the decoder
    temperature: float = 0.9  # of the Gumbel softmax at the first step
    temperature_end: float = 0.9  # at the last step
    usage_weight: float = 0.03  # of the loss that keeps all codes in use

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codes < 2 or self.width < 1:
            raise UserError("task_options.codes is at least 2, task_options.width at least 1.")
        if min(self.temperature, self.temperature_end) <= 0:
            raise UserError("task_options.temperature and temperature_end divide the logits: give numbers above 0.")
        if self.usage_weight < 0:
            raise UserError(f"task_options.usage_weight={self.usage_weight:g} is the weight of a loss: give 0 or more.")


@dataclass(frozen=True)
class SegmentationOptions:
    """A class for every pixel."""

    head: Literal["upernet", "fcn", "linear"] = "upernet"
    channels: int = 512  # of UperNet and FCN
    auxiliary: int = 256  # channels of the FCN head that is trained beside an UperNet; 0: none
    auxiliary_weight: float = 0.4  # of its loss
    dropout: float = 0.1
    blocks: tuple[int, ...] = ()  # blocks whose tokens the head reads; []: the final tokens
    max_class_share: float = 0.75  # crops in which one class has more of the pixels are drawn again; 1: never
    ignore: tuple[int, ...] = ()  # further ids of the mask files that are not trained or evaluated
    short_side: int = 0  # of validation and prediction; 0: that of the crops
    window: int = 0  # side of a sliding window in validation and prediction; 0: whole images if the model takes them
    stride: int = 0  # of the window; 0: two thirds of it

    def __post_init__(self) -> None:
        for name in ("channels", "auxiliary", "short_side", "window", "stride"):
            if not (name == "channels") <= getattr(self, name) <= 1 << 14:
                raise UserError(f"task_options.{name}={getattr(self, name)} is out of range.")
        if not 0 <= self.dropout < 1 or self.auxiliary_weight < 0:
            raise UserError("task_options.dropout is at least 0 and below 1, task_options.auxiliary_weight at least 0.")
        if not 0 < self.max_class_share <= 1:
            raise UserError(f"task_options.max_class_share={self.max_class_share:g} is a share: above 0 and at most 1.")
        if any(not 0 <= number <= 255 for number in self.ignore) or any(block < 0 for block in self.blocks):
            raise UserError("task_options.ignore has ids from 0 to 255, task_options.blocks numbers of blocks from 0 on.")
        if self.stride > self.window:
            raise UserError(
                f"task_options.stride={self.stride} is larger than the window {self.window}: pixels would be left out."
            )


@dataclass(frozen=True)
class DetectionOptions:
    """Boxes and masks of objects by Mask R-CNN."""

    masks: Literal["auto", "on", "off"] = "auto"  # whether masks are learned; auto: if the data has them
    channels: int = 256  # of the pyramid
    hidden: int = 1024  # of the box head
    blocks: tuple[int, ...] = ()  # blocks whose tokens the head reads, four of them; []: the final tokens
    max_objects: int = 64  # of an image that are trained, the first of its list
    candidates: int = 1000  # boxes of each level before duplicates are removed
    proposals: int = 500  # boxes that are classified
    anchors_sampled: int = 256  # of an image, for the loss of the proposals; at most half contain an object
    boxes_sampled: int = 256  # of an image, for the losses of boxes and masks; at most a quarter contains an object
    short_side: int = 0  # of validation and prediction; 0: that of the crops
    long_side: int = 0  # at most; 0: four times the shorter side
    window: int = 0  # side of tiles in validation and prediction; 0: whole images if the model takes them
    stride: int = 0  # of the tiles; 0: three quarters of them

    def __post_init__(self) -> None:
        counts = ("channels", "hidden", "max_objects", "candidates", "proposals", "anchors_sampled", "boxes_sampled")
        for name in (*counts, "short_side", "long_side", "window", "stride"):
            if not (name in counts) <= getattr(self, name) <= (4096 if name in counts else 1 << 14):
                raise UserError(f"task_options.{name}={getattr(self, name)} is out of range.")
        if any(block < 0 for block in self.blocks) or len(self.blocks) not in (0, 4):
            raise UserError("task_options.blocks has the numbers of four blocks, from 0 on, or none.")
        if self.stride > self.window:
            raise UserError(
                f"task_options.stride={self.stride} is larger than the window {self.window}: parts would be left out."
            )


def read_options(kind: type[Options], recipe: Recipe) -> Options:
    """The `task_options` of a recipe as a typed group; unknown keys and wrong values raise UserError."""
    return build_group(kind, recipe.task_options, "task_options")


def complete_options(kind: type[Options], recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with all `task_options` written out, so that a run records the values of its defaults."""
    options: Any = dataclasses.replace(read_options(kind, recipe), **changes)  # type: ignore[type-var]
    return dataclasses.replace(recipe, task_options=write_options(options))


def write_options(options: Any) -> dict[str, Any]:
    """The `task_options` of a recipe: plain values, which are the same after a recipe has been saved and read."""
    values = dataclasses.asdict(options)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
