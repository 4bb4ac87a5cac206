"""Heads that belong to the artifact of a model: built from a configuration, which the artifact stores as JSON.

`model.task_head` is such a head. Its configuration says what it predicts and how, so that one file is enough to load, predict
and evaluate. Another kind of head is a dataclass and a module here, and a line in `KINDS`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.heads.embedding import EmbeddingConfig, EmbeddingHead
from vitrail.heads.mask_rcnn import BoxHead, FeaturePyramid, MaskHead, ProposalHead, PyramidNeck
from vitrail.heads.upernet import FcnHead, LinearHead, UperNetHead

SegmentationKind = Literal["linear", "fcn", "upernet"]
MAX_CLASSES, MAX_CHANNELS, MAX_SIDE = 255, 4096, 1 << 16
MAX_OBJECT_CLASSES = 10_000
CALLS = {  # by task: what weights do that give no class of an image, and the function for it
    "segmentation": "segment images: call vitrail.segment(weights, images)",
    "detection": "detect objects: call vitrail.detect(weights, images)",
}
MAX_ID = 255  # of a class in mask files


@dataclass(frozen=True)
class SegmentationConfig:
    """A class for every pixel: the head, its classes, and the protocol of inference."""

    class_names: tuple[str, ...]
    mask_ids: tuple[int, ...]  # the id of each class in mask files
    short_side: int  # of the images of the network, whose other side is at most four times as long; 0: the stored size
    window: int = 0  # side of a sliding window; 0: whole images
    stride: int = 0  # of the window
    kind: SegmentationKind = "upernet"
    channels: int = 512
    auxiliary: int = 256  # channels of the FCN head that is trained beside an UperNet; 0: none
    dropout: float = 0.1
    blocks: tuple[int, ...] = ()  # blocks whose tokens are the input, such as 3, 5, 7, 11; (): the final tokens

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def check(self) -> None:
        """Raise UserError for values that no head has: a file may contain anything."""
        names, ids = self.class_names, self.mask_ids
        texts = all(isinstance(name, str) for name in names)
        if not 1 <= len(names) <= MAX_CLASSES or len(ids) != len(names) or not texts:
            raise UserError(f"a segmentation head has 1 to {MAX_CLASSES} classes with a name and an id each.")
        integers = (*ids, self.short_side, self.window, self.stride, self.channels, self.auxiliary, *self.blocks)
        if not all(type(value) is int and 0 <= value < MAX_SIDE for value in integers) or not 1 <= self.channels <= MAX_CHANNELS:
            raise UserError("a segmentation head has sizes, ids and blocks that are not plain numbers.")
        if max(ids) > MAX_ID or len(set(ids)) < len(ids) or self.auxiliary > MAX_CHANNELS or (self.window and not self.stride):
            raise UserError("a segmentation head has ids, channels or a window that are out of range.")
        if self.kind not in get_args(SegmentationKind) or not 0 <= self.dropout < 1 or len(self.blocks) > 64:
            raise UserError(f"there is no segmentation head {self.kind!r}.")


class SegmentationHead(nn.Module):
    """Feature maps to logits [B, classes, h, w], and in training those of the auxiliary head."""

    task = "segmentation"  # what `VisionTransformer.task` returns

    def __init__(self, config: SegmentationConfig, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        config.check()
        self.config = config
        classes, width, dropout = config.classes, config.channels, config.dropout
        self.decoder: nn.Module
        if config.kind == "linear":
            self.decoder = LinearHead(channels, classes, normalize=bool(config.blocks))  # the final tokens are normalized
        elif config.kind == "fcn":
            self.decoder = FcnHead(channels, width, classes, dropout=dropout)
        else:
            if len(channels) not in (1, 4):
                raise UserError(f"UperNet takes the final tokens or those of four blocks, not of {len(channels)}.")
            self.decoder = UperNetHead(channels, strides, width, classes, dropout)
        trained_beside = config.kind == "upernet" and config.auxiliary
        # On the map of stride 16, or the third of four.
        self.third = min(2, len(channels) - 1)
        self.auxiliary = (
            FcnHead(channels[self.third : self.third + 1], config.auxiliary, classes, 1, dropout) if trained_beside else None
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        out: Tensor = self.decoder(maps)
        return out

    def auxiliary_logits(self, maps: list[Tensor]) -> Tensor | None:
        return None if self.auxiliary is None else self.auxiliary([maps[self.third]])


@dataclass(frozen=True)
class DetectionConfig:
    """Boxes and masks of objects: the head, its classes, and the protocol of inference."""

    class_names: tuple[str, ...]
    short_side: int  # of the images of the network; 0: the stored size
    long_side: int = 0  # at most; 0: four times the shorter side
    window: int = 0  # side of tiles; 0: whole images
    stride: int = 0  # of the tiles
    masks: bool = True
    channels: int = 256  # of the pyramid
    hidden: int = 1024  # of the box head
    candidates: int = 1000  # boxes of each level before duplicates are removed
    proposals: int = 1000  # boxes that are classified
    proposal_overlap: float = 0.7  # IoU above which a proposal is a duplicate
    overlap: float = 0.5  # the same of the final boxes of a class
    min_score: float = 0.05
    detections: int = 100  # of an image, at most
    blocks: tuple[int, ...] = ()  # blocks whose tokens are the input; (): the final tokens

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def check(self) -> None:
        """Raise UserError for values that no head has: a file may contain anything."""
        if not 1 <= len(self.class_names) <= MAX_OBJECT_CLASSES or not all(isinstance(name, str) for name in self.class_names):
            raise UserError(f"a detection head has 1 to {MAX_OBJECT_CLASSES} classes with a name each.")
        sizes = (self.short_side, self.long_side, self.window, self.stride, *self.blocks)
        counts = (self.channels, self.hidden, self.candidates, self.proposals, self.detections)
        if not all(type(value) is int and 0 <= value < MAX_SIDE for value in sizes) or len(self.blocks) > 64:
            raise UserError("a detection head has sizes and blocks that are not plain numbers.")
        if not all(type(value) is int and 1 <= value <= MAX_CHANNELS for value in counts) or (self.window and not self.stride):
            raise UserError("a detection head has channels, numbers of boxes or a window that are out of range.")
        if not all(
            isinstance(value, float) and 0 <= value <= 1 for value in (self.proposal_overlap, self.overlap, self.min_score)
        ):
            raise UserError("a detection head has thresholds that are not between 0 and 1.")


class DetectionHead(nn.Module):
    """Mask R-CNN: feature maps to the levels of a pyramid, and the heads that read them."""

    task = "detection"

    def __init__(self, config: DetectionConfig, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        config.check()
        self.config = config
        if len(channels) not in (1, 4):
            raise UserError(f"Mask R-CNN takes the final tokens or maps of four blocks or stages, not of {len(channels)}.")
        self.neck = PyramidNeck(channels, strides)
        self.pyramid = FeaturePyramid(self.neck.channels, config.channels)
        self.proposal_head = ProposalHead(config.channels)
        self.box_head = BoxHead(config.channels, config.hidden, config.classes)
        self.mask_head = MaskHead(config.channels, config.classes) if config.masks else None

    @property
    def strides(self) -> list[float]:
        """Of the levels, in pixels."""
        return [*self.neck.strides, 2 * self.neck.strides[-1]]

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = self.pyramid(self.neck(maps))
        return out


KINDS: dict[str, tuple[type[Any], type[nn.Module]]] = {
    "segmentation": (SegmentationConfig, SegmentationHead),
    "detection": (DetectionConfig, DetectionHead),
    "embedding": (EmbeddingConfig, EmbeddingHead),
}


def write_config(head: nn.Module) -> dict[str, Any]:
    """The configuration of a head as plain values, with the name of its kind."""
    config: Any = head.config
    name = next(name for name, (kind, _) in KINDS.items() if isinstance(config, kind))
    return {"task": name} | dataclasses.asdict(config)


def read_config(values: Any) -> Any:
    """The inverse of `write_config`; UserError for anything else."""
    try:
        fields = dict(values)
        kind = KINDS[fields.pop("task")][0]
        config = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        config.check()
    except (KeyError, TypeError, ValueError):
        raise UserError("its task head is not known.") from None
    return config


def build_head(config: Any, channels: Sequence[int], strides: Sequence[int]) -> nn.Module:
    head = next(head for kind, head in KINDS.values() if isinstance(config, kind))
    return head(config, channels, strides)
