"""The comparison of an exported program with its model on real images, whose result is written into the file."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitrail.checkpoints.export_metadata import Certificate, ExportMetadata
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.data.progress import progress
from vitrail.deploy.exported_outputs import ExportedNetwork
from vitrail.deploy.output_differences import make_differences
from vitrail.errors import UserError
from vitrail.version import __version__

BUNDLED = "pets"
IMAGES = 32  # that are compared, and as many others that int8 is calibrated on
Run = Callable[[np.ndarray], list[np.ndarray]]


@dataclass(frozen=True)
class Comparison:
    """Real images, and the network in float32 that defines their outputs."""

    reference: ExportedNetwork
    images: list[np.ndarray]  # uint8 [H, W, 3]
    others: list[np.ndarray]  # for the calibration
    source: str  # name of the data set

    @classmethod
    def read(cls, reference: ExportedNetwork, source: str | Path | None, calibrated: bool) -> "Comparison":
        """Images spread over a data set; None: the bundled photographs."""
        if not all(parameter.isfinite().all() for parameter in reference.parameters()):  # no object is found with those
            raise UserError("The weights of the model contain NaN or Inf: they are damaged.")
        images = read_images(source, 2 * IMAGES if calibrated else IMAGES)
        step = 2 if calibrated and len(images) > 1 else 1
        name = "the bundled pets" if source is None else Path(source).name
        return cls(reference, images[::step], images[step - 1 :: step], name)

    @property
    def calibration(self) -> list[np.ndarray]:
        """Inputs of the network, of one image each."""
        if self.reference.takes_pixels:
            return [image[None] for image in self.others]
        return [self.reference.normalize(image).numpy() for image in self.others]

    def certify(self, run: Run, metadata: ExportMetadata, versions: dict[str, str]) -> ExportMetadata:
        """The metadata with the result of the comparison; UserError if program and model differ by more than rounding."""
        differences = make_differences(self.reference, metadata.precision)
        with progress("comparing", len(self.images)) as advance, torch.inference_mode():
            for image in self.images:
                expected = self.reference.expected(image)
                if not all(each.isfinite().all() for each in expected):
                    raise UserError("The outputs of the model are NaN or Inf: its weights are damaged.")
                inputs = image[None] if metadata.input == "image" else self.reference.normalize(image).numpy()
                differences.add([torch.from_numpy(each) for each in run(inputs)], expected)
                advance(1)
        if problem := differences.problem(metadata.precision):
            advice = "give --precision fp32" if metadata.precision == "fp16" else "report it, with the model"
            raise UserError(f"{problem}: nothing was written; {advice}.")
        versions = {"vitrail": __version__, "torch": str(torch.__version__)} | versions
        certificate = Certificate(
            len(self.images),
            self.source,
            differences.largest_difference,
            differences.largest,
            differences.agreement if metadata.task != "features" else None,
            versions,
            differences.objects,
        )
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
