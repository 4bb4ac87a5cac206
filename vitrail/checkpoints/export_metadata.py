"""What an exported file says about itself: task, preprocessing, class names, versions, and how exactly it was compared."""

import dataclasses
import json
from dataclasses import dataclass

from vitrail.errors import UserError
from vitrail.formatting import percent
from vitrail.models.preprocessing import Preprocessing, are_numbers
from vitrail.version import __version__

ENTRY = "vitrail"  # the entry of an ONNX file's metadata; with .json the extra file of a torch program
LAYOUT = 1
MAX_CHARACTERS = 1 << 24
TASKS = ("classification", "features", "segmentation")
INPUTS = ("image", "tensor")
PRECISIONS = ("fp32", "fp16", "int8")


@dataclass(frozen=True)
class Certificate:
    """The comparison of an exported program with the model in this package, in float32, on real images."""

    images: int
    source: str
    max_difference: float  # of any output
    largest: float  # absolute output
    agreement: float | None  # share of images, or of positions of a segmentation, with the same top-1 class; None of features
    versions: dict[str, str]

    def __str__(self) -> str:
        same = "" if self.agreement is None else f", same top-1 for {percent(self.agreement, 1)}"
        what = f"largest difference {self.max_difference:.2g} (largest output {self.largest:.3g}){same}"
        return f"{what}, on {self.images} images of {self.source}"


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
        """The metadata of a file, which may be from anybody; UserError if it is damaged."""
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
