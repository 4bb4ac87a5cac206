"""ONNX files, computed by onnxruntime: on the GPU where its build can, else on the CPU."""

from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.teachers.fixed_shape import Fixed, first_line, fixed_parts


class Onnx(Fixed):
    def __init__(self, path: Path, device: torch.device | None):
        super().__init__()
        try:
            import onnxruntime
        except ImportError:
            raise UserError("An ONNX teacher needs onnxruntime: pip install onnxruntime.") from None
        cuda = device is not None and device.type == "cuda"
        wanted = ["CUDAExecutionProvider"] * cuda + ["CPUExecutionProvider"]
        providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=providers)
            (source,) = self.session.get_inputs()
            self.only_batch, self.only_size = fixed_parts([side if isinstance(side, int) else None for side in source.shape])
        except Exception as error:  # its exceptions have no other class in common
            raise UserError(f"{path} cannot be opened as an ONNX file with one input ({first_line(error)}).") from None
        self.source, self.answer = source.name, self.session.get_outputs()[0].name
        self.precision = torch.float16 if source.type == "tensor(float16)" else torch.float32

    def call(self, images: Tensor) -> Tensor:
        (answer,) = self.session.run([self.answer], {self.source: images.to("cpu", self.precision).numpy()})
        return torch.from_numpy(answer).to(images.device)
