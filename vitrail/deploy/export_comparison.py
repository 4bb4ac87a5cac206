"""The comparison of an exported program with its model on real images, whose result is written into the file."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.export_metadata import Certificate, ExportMetadata
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.data.progress import progress
from vitrail.deploy.exported_outputs import ExportedNetwork
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing, pad_images
from vitrail.version import __version__

BUNDLED = "pets"
IMAGES = 32  # that are compared, and as many others that int8 is calibrated on
# The largest difference of float outputs, relative to the largest output: more is an error of the export and not rounding.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
Run = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """Real images, and the network in float32 that defines their outputs."""

    reference: ExportedNetwork
    pixels: list[np.ndarray]  # uint8 [H, W, 3]
    normalized: list[Tensor]  # the same images [1, 3, height, width]
    calibration: list[Tensor]  # other images
    source: str  # name of the data set

    @classmethod
    def read(
        cls, reference: ExportedNetwork, preprocessing: Preprocessing, source: str | Path | None, calibrated: bool
    ) -> "Comparison":
        """Images spread over a data set; None: the bundled photographs."""
        pixels = read_images(source, 2 * IMAGES if calibrated else IMAGES)
        normalized = [preprocessing.apply(*pad_images([image])) for image in pixels]
        step = 2 if calibrated and len(pixels) > 1 else 1
        name = "the bundled pets" if source is None else Path(source).name
        return cls(reference, pixels[::step], normalized[::step], normalized[step - 1 :: step], name)

    def certify(self, run: Run, metadata: ExportMetadata, versions: dict[str, str]) -> ExportMetadata:
        """The metadata with the result of the comparison; UserError if program and model differ by more than rounding."""
        difference, largest, same, total = 0.0, 0.0, 0, 0
        with progress("comparing", len(self.pixels)) as advance, torch.inference_mode():
            for image, batch in zip(self.pixels, self.normalized, strict=True):
                expected = self.reference(batch)
                actual = torch.from_numpy(run(image[None] if metadata.input == "image" else batch.numpy()))
                if not expected.isfinite().all():
                    raise UserError("The outputs of the model are NaN or Inf: its weights are damaged.")
                difference = max(difference, float((actual - expected).abs().max().nan_to_num(torch.inf)))
                largest = max(largest, float(expected.abs().max()))
                matches = actual.argmax(1) == expected.argmax(1)
                same, total = same + int(matches.sum()), total + matches.numel()
                advance(1)
        if difference > TOLERANCE.get(metadata.precision, float("inf")) * largest:
            advice = "give --precision fp32" if metadata.precision == "fp16" else "report it, with the model"
            raise UserError(
                f"The outputs of the exported program differ from the model's by up to {difference:.2g}, of {largest:.2g}: "
                f"nothing was written; {advice}."
            )
        versions = {"vitrail": __version__, "torch": str(torch.__version__)} | versions
        agreement = None if metadata.task == "features" else same / total
        certificate = Certificate(len(self.pixels), self.source, difference, largest, agreement, versions)
        return dataclasses.replace(metadata, certificate=certificate)


def read_images(source: str | Path | None, count: int) -> list[np.ndarray]:
    """Up to `count` readable images, spread over a data set, uint8 [H, W, 3] at their full size."""
    name = BUNDLED if source is None else os.fspath(source)
    images = open_source(name, "test" if source is None else None)
    pixels: list[np.ndarray] = []
    for index in np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int).tolist():
        try:
            pixels.append(decode(images.encoded(index)))
        except (OSError, ValueError):
            continue
    if not pixels:
        raise UserError(f"{name} contains no image that can be read: give a folder of images.")
    return pixels
