"""Programs of segmentation and detection: images are shown whole in a frame of fixed size, outputs are in pixels of the image.

The number of objects is fixed too: the best ones, then rows of zeros.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.deploy.exported_outputs import ExportedNetwork
from vitrail.deploy.image_input import FramedImages, fit_size
from vitrail.evaluation.detections import (
    DetectionProtocol,
    detect_padded,
    detection_head,
    find_candidates,
    predict_masks,
)
from vitrail.evaluation.semantic_masks import View, normalize, predict_logits
from vitrail.heads.boxes import suppress
from vitrail.models.preprocessing import pad_images
from vitrail.models.vision_transformer import VisionTransformer

OBJECTS = ("boxes", "scores", "classes", "count")  # outputs of a detection; with a mask head, masks too
PIXELS = ("classes", "logits")  # of a segmentation that takes images


class SegmentationProgram(ExportedNetwork):
    """uint8 images [B, height, width, 3] of any size to classes, uint8 [B, height, width], and logits [B, C, h, w] of frames."""

    takes_pixels = True

    def __init__(self, model: VisionTransformer):
        super().__init__(model, "segmentation")
        self.outputs, self.preprocess = PIXELS, FramedImages(model.preprocessing)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalized, size = self.preprocess(images)
        logits = predict_logits(self.model, normalized.to(self.dtype)).float()
        frame = self.model.preprocessing.image_size
        extent = size[0].double() / frame[0], size[1].double() / frame[1]
        return classify_pixels(View(logits, extent), images.shape[1:3]), logits

    def expected(self, pixels: np.ndarray) -> list[Tensor]:
        normalized, (height, width) = frame_image(self.model, pixels)
        logits = predict_logits(self.model, normalized)
        extent = height / normalized.shape[2], width / normalized.shape[3]
        return [classify_pixels(View(logits, extent), pixels.shape), logits]


class DetectionProgram(ExportedNetwork):
    """Images to their K best objects: boxes [B, K, 4], scores and classes [B, K], count [B], masks [B, K, 28, 28].

    Images are uint8 [B, height, width, 3] of any size, or normalized [B, 3, *image_size]. Boxes are in their pixels. Rows from
    `count` on are 0.
    """

    def __init__(self, model: VisionTransformer, input: str):
        super().__init__(model, "detection")
        head = detection_head(model)
        self.protocol, self.takes_pixels = DetectionProtocol.of(head.config), input == "image"
        self.outputs = OBJECTS if head.mask_head is None else (*OBJECTS, "masks")
        self.preprocess = FramedImages(model.preprocessing)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if not self.takes_pixels:
            return self.detect(images, (images.shape[2], images.shape[3]))
        normalized, size = self.preprocess(images)
        boxes, *others = self.detect(normalized, (size[0].float(), size[1].float()))
        height, width = (torch.full_like(side, own) / side for side, own in zip(size.unbind(), images.shape[1:3], strict=True))
        return boxes * torch.stack([width, height, width, height]), *others

    def detect(self, normalized: Tensor, size: tuple[float | Tensor, float | Tensor]) -> tuple[Tensor, ...]:
        """The outputs for images of `size` in the upper left corners of frames, in pixels of the frame."""
        head, protocol = detection_head(self.model), self.protocol
        maps, found = find_candidates(self.model, normalized.to(self.dtype), size)
        kept = suppress(found.boxes, protocol.overlap, groups=found.classes) & (found.scores >= protocol.min_score)
        scores, index = torch.where(kept, found.scores, -1.0).topk(min(protocol.detections, kept.shape[1]), 1)
        valid = scores >= 0
        boxes = found.boxes.gather(1, index[..., None].expand(-1, -1, 4)) * valid[..., None]
        classes = found.classes.gather(1, index) * valid
        masks = predict_masks(head, maps, boxes, classes)
        outputs = (boxes, scores * valid, classes, valid.sum(1))
        return outputs if masks is None else (*outputs, masks * valid[..., None, None])

    def normalize(self, pixels: np.ndarray) -> Tensor:
        return frame_image(self.model, pixels)[0]

    def expected(self, pixels: np.ndarray) -> list[Tensor]:
        """The objects without padding: boxes [N, 4], scores, classes [N], masks [N, 28, 28]."""
        normalized, size = frame_image(self.model, pixels)
        if not self.takes_pixels:
            size = (normalized.shape[2], normalized.shape[3])
        (found,) = detect_padded(self.model, normalized, size, self.protocol)
        if self.takes_pixels:
            height, width = (side / own for side, own in zip(pixels.shape, size, strict=False))
            found = found._replace(boxes=found.boxes * torch.tensor([width, height, width, height]))
        return [each for each in found if each is not None]


def classify_pixels(view: View, size: Sequence[int]) -> Tensor:
    """The class of each pixel of an image of `size`, uint8 [B, height, width]."""
    rows = torch.arange(size[0], device=view.logits.device)
    return view.resize_rows(size[:2], rows).argmax(1).to(torch.uint8)


def frame_image(model: VisionTransformer, pixels: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """What `FramedImages` returns for an image, uint8 [H, W, 3], by the resizing of this package."""
    images, sizes = pad_images([pixels])
    frame = model.preprocessing.image_size
    height, width = fit_size(sizes[0], frame).tolist()
    resized = normalize(model, images, (height, width))
    return F.pad(resized, (0, frame[1] - width, 0, frame[0] - height)), (height, width)
