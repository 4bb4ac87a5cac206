"""ONNX files, run by onnxruntime: on the GPU if its build supports it, else on the CPU."""

from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.teachers.fixed_shape import FixedShapeNetwork, first_line, fixed_dimensions


class OnnxNetwork(FixedShapeNetwork):
    def __init__(self, path: Path, device: torch.device | None):
        super().__init__()
        try:
            import onnxruntime
        except ImportError:
            raise UserError("An ONNX teacher needs onnxruntime: pip install onnxruntime.") from None
        cuda = device is not None and device.type == "cuda"
        preferred = ["CUDAExecutionProvider"] * cuda + ["CPUExecutionProvider"]
        providers = [name for name in preferred if name in onnxruntime.get_available_providers()]
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=providers)
            (source,) = self.session.get_inputs()
            shape = [side if isinstance(side, int) else None for side in source.shape]
            self.fixed_batch_size, self.fixed_size = fixed_dimensions(shape)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise UserError(f"{path} cannot be opened as an ONNX file with one input ({first_line(error)}).") from None
        self.input_name, self.output_name = source.name, self.session.get_outputs()[0].name
        self.dtype = torch.float16 if source.type == "tensor(float16)" else torch.float32

    def run(self, images: Tensor) -> Tensor:
        (logits,) = self.session.run([self.output_name], {self.input_name: images.to("cpu", self.dtype).numpy()})
        return torch.from_numpy(logits).to(images.device)
