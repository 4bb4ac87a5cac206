"""ONNX files, run by onnxruntime: on the GPU if its build supports it, else on the CPU.

A file is parsed once and checked, and onnxruntime gets what was checked: standard operators without subgraphs or functions of the
file, and tensors in the file or in regular files of the same folder. Of a file of `vitrail.export` the metadata is read too, and
its preprocessing is removed: images come normalized from the preprocessing of this package, which is the same.
"""

from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.export_metadata import ENTRY, NORMALIZED, PREFIX, ExportMetadata
from vitrail.devices import free_memory
from vitrail.errors import UserError
from vitrail.teachers.fixed_shape import FixedShapeNetwork, first_line, fixed_dimensions

MAX_FILLED = 2**26  # values of a tensor that a node fills with one value
STANDARD = ("", "ai.onnx")  # names of the standard domain
# Without Loop and Scan, every program ends.
OPERATORS = frozenset(
    (
        *(
            "Abs",
            "Add",
            "And",
            "ArgMax",
            "AveragePool",
            "BatchNormalization",
            "Cast",
            "CastLike",
            "Ceil",
            "Celu",
            "Clip",
            "Concat",
        ),
        *("Constant", "ConstantOfShape", "Conv", "Cos", "CumSum", "DepthToSpace", "DequantizeLinear", "Div", "Dropout", "Einsum"),
        *("Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm"),
        *("GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "GroupNormalization", "HardSigmoid", "HardSwish"),
        *("Identity", "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual"),
        *(
            "Log",
            "LogSoftmax",
            "LpNormalization",
            "MatMul",
            "MatMulInteger",
            "Max",
            "MaxPool",
            "Mean",
            "Min",
            "Mish",
            "Mod",
            "Mul",
        ),
        *("Neg", "Not", "Or", "PRelu", "Pad", "Pow", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "Range", "Reciprocal"),
        *("ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape"),
        *("Resize", "Round", "ScatterND", "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softmax", "Softplus"),
        *("SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze"),
        *("Upsample", "Where", "Xor", "DynamicQuantizeLinear", "ConvInteger", "Attention", "RMSNormalization"),
        *("Swish", "Softsign", "ThresholdedRelu", "EyeLike", "RotaryEmbedding"),
    )
)


class OnnxNetwork(FixedShapeNetwork):
    metadata: ExportMetadata | None  # of a file of `vitrail.export`

    def __init__(self, path: Path, device: torch.device | None):
        super().__init__()
        try:
            import onnx
            import onnxruntime
        except ImportError:
            raise UserError("An ONNX teacher needs onnx and onnxruntime: pip install onnx onnxruntime.") from None
        cuda = device is not None and device.type == "cuda"
        preferred = ["CUDAExecutionProvider"] * cuda + ["CPUExecutionProvider"]
        providers = [name for name in preferred if name in onnxruntime.get_available_providers()]
        try:
            model = onnx.ModelProto.FromString(path.read_bytes())
            self.metadata = read_metadata(model, path)
            for content in find_unsafe_content(model, path):
                raise ValueError(f"it contains {content}")
            model.DiscardUnknownFields()
            if self.metadata is not None and self.metadata.input == "image":
                remove_preprocessing(model, self.metadata)
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4  # errors are raised too
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
            options.add_session_config_entry("session.use_env_allocators", "1")
            limit_memory()
            self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
            (source,) = self.session.get_inputs()
            shape = [side if isinstance(side, int) else None for side in source.shape]
            self.fixed_batch_size, self.fixed_size = fixed_dimensions(shape)
        except UserError:
            raise
        except Exception as error:  # the exceptions of onnx and onnxruntime have no common base class
            raise UserError(f"{path} cannot be opened as an ONNX file with one input ({first_line(error)}).") from None
        self.input_name, self.output_name = source.name, self.session.get_outputs()[0].name
        self.dtype = torch.float16 if source.type == "tensor(float16)" else torch.float32

    def run(self, images: Tensor) -> Tensor:
        (logits,) = self.session.run([self.output_name], {self.input_name: images.to("cpu", self.dtype).numpy()})
        return torch.from_numpy(logits).to(images.device)


def read_metadata(model: Any, path: Path) -> ExportMetadata | None:
    """What a file of `vitrail.export` says about itself, None of another file; UserError if it has no logits of classes."""
    text = next((entry.value for entry in model.metadata_props if entry.key == ENTRY), None)
    if text is None:
        return None
    metadata = ExportMetadata.from_json(text, path)
    metadata.require_classes(path)
    return metadata


def remove_preprocessing(model: Any, metadata: ExportMetadata) -> None:
    """Make the normalized images, which the preprocessing of the file computes, its input."""
    from onnx import TensorProto, helper

    graph = model.graph
    kept = [node for node in graph.node if not node.name.startswith(PREFIX)]
    constants = [tensor for tensor in graph.initializer if not tensor.name.startswith(PREFIX)]
    for field, values in ((graph.node, kept), (graph.initializer, constants)):
        del field[:]
        field.extend(values)
    del graph.input[:], graph.value_info[:]
    shape = ["batch", 3, *metadata.preprocessing.image_size]
    graph.input.append(helper.make_tensor_value_info(NORMALIZED, TensorProto.FLOAT, shape))


@cache
def limit_memory() -> None:
    """Limit what onnxruntime may allocate on the CPU to the memory that is available now."""
    import onnxruntime

    cpu = onnxruntime.OrtMemoryInfo("Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(cpu, onnxruntime.OrtArenaCfg({"max_mem": free_memory()}))  # 0: no limit


def find_unsafe_content(model: Any, path: Path) -> Iterator[str]:
    """Descriptions of everything in a parsed file that could run code, read other files or never end."""
    graph = model.graph
    # A program can also compute a shape; the limit of memory applies to that.
    shapes = {tensor.name: tensor for tensor in graph.initializer}
    shapes |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant" and node.attribute}
    if model.functions or model.training_info or graph.sparse_initializer:
        yield "functions, training steps or sparse tensors"
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input and is_large(shapes.get(node.input[0])):
            yield f"a tensor of one value repeated more than {MAX_FILLED:,} times"
        if node.domain not in STANDARD or node.op_type not in OPERATORS:
            yield f"the operator {'.'.join(filter(None, (node.domain, node.op_type)))[:80]!r}, which is not supported"
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                yield "a subgraph or a sparse tensor"
            for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                if tensor.external_data or tensor.data_location or exceeds(tensor, tensor.ByteSize()):
                    yield "a constant without its data"
    for tensor in graph.initializer:
        available = tensor.ByteSize()
        if tensor.external_data or tensor.data_location:
            location = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
            file = path.with_name(location) if location and Path(location).name == location else None
            if file is None or not file.is_file():
                yield f"a tensor in {location[:80]!r}, which is not a file of the same folder"
                return
            available = file.stat().st_size
        if exceeds(tensor, available):
            yield f"the tensor {tensor.name[:80]!r}, whose shape is larger than its data"


def is_large(shape: Any) -> bool:
    """Whether the values of a tensor are a shape of more than MAX_FILLED values; False without data in the file."""
    if shape is None or shape.external_data or shape.ByteSize() > 4096:
        return False
    from onnx import numpy_helper

    return bool(prod(numpy_helper.to_array(shape).reshape(-1).tolist()) > MAX_FILLED)


def exceeds(tensor: Any, available: int) -> bool:
    """Whether a tensor has more values than fit into the available bytes; the smallest values have four bits."""
    return min(tensor.dims, default=0) < 0 or prod(tensor.dims) > 2 * available
