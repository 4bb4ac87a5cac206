"""ONNX files: network and preprocessing are converted one by one, the network is quantized if requested, and both are merged."""

import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from vitrail.atomic_files import describe_error
from vitrail.checkpoints.export_metadata import ENTRY, NORMALIZED, PREFIX, ExportMetadata
from vitrail.deploy.export_comparison import Comparison, Run
from vitrail.deploy.exported_outputs import ExportedNetwork
from vitrail.deploy.image_input import ImagePreprocessing
from vitrail.errors import UserError

OPSET = 20  # the first with GELU; onnxruntime 1.17 and later
MAX_BYTES = 2_000_000_000  # of a protobuf message
PRODUCTS = ("MatMul", "Gemm", "Conv")


def import_onnx() -> None:
    """Raise UserError if a package of the extra `export` is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"Exporting to ONNX needs {error.name}: pip install 'vitrail[export]'.") from None


def build_model(
    network: ExportedNetwork, comparison: Comparison, metadata: ExportMetadata, step: int | None
) -> tuple[bytes, ExportMetadata]:
    """The bytes of an ONNX file that was compared with the model, and its metadata with the result."""
    import_onnx()
    preprocessing = metadata.preprocessing
    model = convert_network(network, preprocessing.image_size, step)
    if metadata.precision == "int8":
        model = quantize(model, comparison.calibration, convs=not len(network.model.blocks))
    if metadata.input == "image" and not network.takes_pixels:
        model = merge(convert_preprocessing(ImagePreprocessing(preprocessing).eval()), model)
    run, versions = open_session(model)
    metadata = comparison.certify(run, metadata, versions)
    model.producer_name, model.producer_version = "vitrail", metadata.version
    model.metadata_props.add(key=ENTRY, value=metadata.to_json())
    return model.SerializeToString(), metadata


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Without messages on optional packages and on internals of torch."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def convert(module: nn.Module, example: Tensor, dims: dict[int, Any], name: str, outputs: Sequence[str]) -> Any:
    """The ONNX model of a module with one input and with outputs of these names, as a protobuf message."""
    try:
        with quiet_exporter(), torch.no_grad():
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[name],
                output_names=outputs,
                dynamic_shapes=(dims,),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise UserError(
            f"torch cannot convert this model to ONNX ({describe_error(error)}): choose --to torch-export."
        ) from error
    assert program is not None
    model = program.model_proto
    graph = model.graph
    del graph.value_info[:]  # shapes that later rewrites would contradict
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")  # stack traces, with paths of this machine
        part.ClearField("doc_string")
    return model


def convert_network(network: ExportedNetwork, size: tuple[int, int], step: int | None) -> Any:
    """The network; height and width are dynamic multiples of `step` unless it is None."""
    if sum(parameter.nbytes for parameter in network.parameters()) > MAX_BYTES:
        raise UserError("The weights exceed the 2 GB that an ONNX file can contain: give --precision fp16, or --to torch-export.")
    if network.takes_pixels:
        return convert_images(network, network.outputs)
    dims: dict[int, Any] = {0: Dim("batch")}
    if step is not None:
        dims |= {2: step * Dim("rows", min=2), 3: step * Dim("columns", min=2)}
    return convert(network, torch.zeros(2, 3, *size), dims, NORMALIZED, network.outputs)


def convert_preprocessing(preprocess: nn.Module) -> Any:
    return convert_images(preprocess, [NORMALIZED])


def convert_images(module: nn.Module, outputs: Sequence[str]) -> Any:
    """A module that takes uint8 images of any size."""
    dims = {0: Dim("batch"), 1: Dim("height"), 2: Dim("width")}
    return convert(module, torch.zeros(2, 301, 203, 3, dtype=torch.uint8), dims, "images", outputs)


def merge(preprocessing: Any, network: Any) -> Any:
    """One model of both; the value between them is called `NORMALIZED`."""
    from onnx import compose

    prefixed = compose.add_prefix(preprocessing, PREFIX, rename_inputs=False, rename_outputs=False)
    merged = compose.merge_models(prefixed, network, [(NORMALIZED, NORMALIZED)])
    del merged.opset_import[1:]  # both have the same
    merged.ir_version = network.ir_version
    merged.graph.name = "vitrail"
    return merged


def split(content: bytes) -> tuple[bytes, bytes]:
    """The preprocessing and the network of a file that takes images of any size, as two files: the inverse of `merge`."""
    import onnx
    from onnx.utils import Extractor

    model = onnx.load_from_string(content)
    extractor = Extractor(model)
    outputs = [output.name for output in model.graph.output]
    preprocessing = extractor.extract_model(["images"], [NORMALIZED])
    network = extractor.extract_model([NORMALIZED], outputs)
    for part in (preprocessing, network):
        part.ir_version = model.ir_version
    network.metadata_props.extend(model.metadata_props)
    return preprocessing.SerializeToString(), network.SerializeToString()


def quantize(network: Any, images: Sequence[np.ndarray], convs: bool) -> Any:
    """The network with products in int8: ranges of their inputs from images of its own input, weights per channel.

    The first and the last layer stay as they are, and convolutions too, except those of a convnet (`convs`).
    """
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        rows = iter([{network.graph.input[0].name: image} for image in images])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.rows, None)

    constants = {tensor.name for tensor in network.graph.initializer}
    layers = [node for node in network.graph.node if node.op_type in PRODUCTS and node.input[1] in constants]
    kept = [layer.name for layer in layers[1:-1] if convs or layer.op_type != "Conv"]
    with tempfile.TemporaryDirectory() as folder, quiet_exporter(), redirect_stdout(io.StringIO()):
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(network, source)
        quantization.quantize_static(
            source,
            target,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            nodes_to_quantize=kept,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        model = onnx.load(target)
    del model.graph.value_info[:]
    return model


def open_session(model: Any) -> tuple[Run, dict[str, str]]:
    """A function that runs the model in onnxruntime, and the versions of what it uses."""
    import onnx
    import onnxruntime

    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (source,) = session.get_inputs()

    def run(images: np.ndarray) -> list[np.ndarray]:
        outputs: list[np.ndarray] = session.run(None, {source.name: images})
        return outputs

    return run, {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__, "opset": str(OPSET)}
