"""The metadata of an exported file: task, preprocessing, class names, versions, and how exactly it was compared."""

import dataclasses
import json
from dataclasses import dataclass

from vitrail.errors import UserError
from vitrail.formatting import percent
from vitrail.models.preprocessing import Preprocessing, are_numbers
from vitrail.version import __version__

ENTRY = "vitrail"  # the entry of an ONNX file's metadata; with .json the extra file of a torch program
NORMALIZED = "normalized"  # in an ONNX file, the tensor between preprocessing and network
PREFIX = "preprocess/"  # of all other names in the preprocessing
LAYOUT = 1
MAX_CHARACTERS = 1 << 24
TASKS = ("classification", "features", "segmentation", "detection")
INPUTS = ("image", "tensor")
PRECISIONS = ("fp32", "fp16", "int8")


@dataclass(frozen=True)
class Certificate:
    """The comparison of an exported program with the model in this package, in float32, on real images."""

    images: int
    source: str
    max_difference: float  # of any output; of a detection in pixels, of the boxes that both found
    largest: float  # absolute output; of a detection the largest coordinate
    # Share of images, or of pixels, with the same top-1 class, or of objects that both found; None of features
    agreement: float | None
    versions: dict[str, str]
    objects: int | None = None  # of a detection: found by the model

    def __str__(self) -> str:
        if self.objects is not None:
            return self.describe_objects()
        same = "" if self.agreement is None else f", same top-1 for {percent(self.agreement, 1)}"
        what = f"largest difference {self.max_difference:.2g} (largest output {self.largest:.3g}){same}"
        return f"{what}, on {self.images} images of {self.source}"

    def describe_objects(self) -> str:
        where = f"on {self.images} images of {self.source}"
        if self.agreement is None:
            return f"neither found an object {where}: give --images that show some"
        boxes = f"boxes differ by at most {self.max_difference:.2g} pixels"
        return f"{percent(self.agreement, 1)} of {self.objects:,} objects are the same, {boxes}, {where}"


@dataclass(frozen=True)
class ExportMetadata:
    name: str
    task: str
    input: str  # "image": uint8 [B, height, width, 3] of any size; "tensor": normalized float32 [B, 3, height, width]
    precision: str
    preprocessing: Preprocessing
    class_names: list[str] | None
    decode_side: int | None  # the shorter side that JPEG files keep when they are decoded at reduced size
    certificate: Certificate | None = None
    version: str = __version__

    def to_json(self) -> str:
        fields = dataclasses.asdict(self) | {"preprocessing": self.preprocessing.to_dict()}
        return json.dumps({"layout": LAYOUT} | fields)

    @classmethod
    def from_json(cls, text: str, path: object) -> "ExportMetadata":
        """The metadata of an untrusted file; UserError if it is damaged."""
        try:
            if len(text) > MAX_CHARACTERS:
                raise ValueError("too long")
            fields = json.loads(text)
            if fields.pop("layout") != LAYOUT:
                raise UserError(f"{path} was exported by another version of Vitrail ({fields['version']}): export it again.")
            certificate = fields.pop("certificate")
            fields["preprocessing"] = Preprocessing.from_dict(fields["preprocessing"])
            metadata = cls(**fields, certificate=Certificate(**certificate) if certificate is not None else None)
            metadata.check()
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise UserError(f"{path} has damaged metadata of Vitrail: export it again.") from None
        return metadata

    def require_classes(self, path: object) -> None:
        """Raise UserError for a file that does not compute the logits of classes."""
        if self.task in ("segmentation", "detection"):
            raise UserError(
                f"{path} was exported for {self.task}, which this package runs from weights only: give the weights, or run the "
                "file with onnxruntime."
            )
        if self.task != "classification":
            raise UserError(f"{path} was exported for {self.task}: predictions of classes need a model with a classifier.")

    def check(self) -> None:
        """Raise ValueError or UserError for values that no export writes."""
        self.preprocessing.check()
        names, side = self.class_names, self.decode_side
        texts = (self.name, self.version, *(names or ()))
        if self.task not in TASKS or self.input not in INPUTS or self.precision not in PRECISIONS:
            raise ValueError("choices")
        if not all(type(text) is str for text in texts) or (names is not None and type(names) is not list):
            raise ValueError("names")
        if side is not None and (not are_numbers([side], 1) or not 0 < side < 1 << 16):
            raise ValueError("decode_side")
