"""`vitrail.optimize`: a faster copy of a model for inference, folded, compiled and captured or packed, and compared with it."""

import copy
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.deploy.float8 import to_float8
from vitrail.deploy.fold import Notes, fold
from vitrail.deploy.folded_layers import FoldedFeedForward, FoldedModel
from vitrail.deploy.inference_graphs import MAX_GRAPH_BATCH, GraphCache
from vitrail.deploy.onednn import can_pack, pack
from vitrail.deploy.options import DTYPES, RESIZED, check_arguments, check_precision, choose_dtype, example_warning
from vitrail.deploy.parity import difference, disable_tf32, first_difference, make_check_images
from vitrail.errors import UserError
from vitrail.layers.kernels import exporting
from vitrail.models.inputs import check_input
from vitrail.models.vision_transformer import VisionTransformer

# A rewritten network rounds in other places. Its error may be ROUNDING_FACTOR times the error of the original in the same
# precision, or MIN_EPS times the machine epsilon of that precision, whichever is larger.
ROUNDING_FACTOR, MIN_EPS = 4.0, 16.0
QUANTIZED = ("int8", "fp8")
ADVICE = {"int8": "pass more of your own images as the example, or use bf16", "fp8": "use bf16"}
NO_EXAMPLE = "calibration on real images: no example was given, the int8 ranges come from synthetic images"
QUANTIZED_TOLERANCE = 0.25  # int8 and fp8: a larger difference means that the quantization failed
SAVE_ORIGINAL = "save the original model with vitrail.save, or this one with its method save."
TF32_EPS = 2.0**-10  # GPUs may compute float32 products in TF32, convolutions by default


@dataclass(frozen=True)
class Report:
    """Rewrites that were applied to a model, those that were skipped and why, and how far its logits moved on fixed images.

    An error is the largest absolute difference of any logit, divided by the largest logit. `folding_error`: the folded network in
    float32. `total_error`: the network as it runs, in its precision. `rounding_error`: the original in the same precision.
    """

    goal: str
    precision: str
    applied: tuple[str, ...]
    skipped: tuple[str, ...]
    folding_error: float
    total_error: float
    rounding_error: float
    parameters: tuple[int, int]  # before and after
    same_top1: tuple[int, int]  # images with the same top-1 prediction, of how many that `total_error` covers

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        lines = [f"optimized for {self.goal} in {self.precision}"]
        lines += [f"  applied  {text}" for text in self.applied]
        lines += [f"  skipped  {text}" for text in self.skipped]
        error = f"  error relative to the largest logit: {self.total_error:.1e}, of which folding {self.folding_error:.1e}"
        if self.rounding_error:
            error += f"; the original in {self.precision}: {self.rounding_error:.1e}"
        if self.precision in QUANTIZED:
            error += f"; same top-1 prediction for {self.same_top1[0]} of {self.same_top1[1]} images"
        return "\n".join([*lines, error])


class MissingAttribute(UserError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


class Optimized(nn.Module):
    """An inference-only network: images [B, K, height, width] to logits [B, C], the same as the original model's.

    It cannot be trained. `save` writes it for machines of the same kind. `report` lists what was done.
    """

    report: Report

    def __init__(
        self,
        folded: FoldedModel,
        dtype: torch.dtype,
        compiled: bool,
        graphs: bool,
        packed: bool = False,
        quantized: bool = False,
        batch_size: int | None = None,
    ):
        super().__init__()
        self.folded, self.dtype, self.packed, self.quantized = folded.to(dtype), dtype, packed, quantized
        backbone = folded.backbone
        self.architecture, self.preprocessing, self.class_names = (
            backbone.architecture,
            backbone.preprocessing,
            backbone.class_names,
        )
        self.name, self.compiled = backbone.name, compiled
        self.device = next(folded.parameters()).device
        # Shape, dtype and device of the last valid input, which need no second check.
        self.checked: tuple[torch.Size, torch.dtype, torch.device] | None = None
        self.graphs = GraphCache(self._compute, batch_size) if graphs else None
        super().train(False)
        if compiled:
            compile_parts(backbone)

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # the checks would become guards of the caller's graph
            self._check(image)
        if self.packed:
            if exporting():
                raise UserError("a model packed for the CPU cannot be exported; export the original model.")
            out: Tensor = self._uncompiled(image)
            return out
        return self._compute(image) if self.graphs is None else self.graphs(image)

    def _check(self, image: Tensor) -> None:
        signature = (image.shape, image.dtype, image.device) if isinstance(image, Tensor) else None
        if signature is None or signature != self.checked:
            backbone = self.folded.backbone
            check_input(image, backbone.architecture, backbone.stem, backbone.grid, resize_hint=RESIZED)
            if image.device != self.device:
                raise UserError(f"the images are on {image.device} and the model is on {self.device}; move the images there.")
            self.checked = signature

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _uncompiled(self, image: Tensor) -> Tensor:
        """Run outside of a caller's torch.compile, which cannot trace packed weights."""
        if not len(image):  # oneDNN's int8 products need at least one row
            return self._compute(image.new_zeros(1, *image.shape[1:]))[:0]
        return self._compute(image)

    def _compute(self, image: Tensor) -> Tensor:
        logits = self.folded(image.to(self.dtype))
        if self.quantized:  # int8 cannot represent NaN: a NaN of the input is passed on to the logits
            logits = logits + image.flatten(1).sum(1).mul(0.0)[:, None]
        out: Tensor = logits.float() if self.dtype == torch.bfloat16 else logits
        return out

    def save(self, path: str | Path) -> Path:
        """Write a file that `vitrail.load_optimized` opens on machines of the same kind, with the same version of torch."""
        from vitrail.deploy.saved_optimized import save_optimized

        return save_optimized(self, Path(path))

    def train(self, mode: bool = True) -> "Optimized":
        if mode:
            raise UserError("an optimized model cannot be trained; train the original model and optimize it again.")
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "folded" not in self._modules or not hasattr(self.folded.backbone, name):
                raise
        raise MissingAttribute(f"an optimized model has no {name}; use the original model's.")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Optimized":
        """A copy that compiles its blocks and captures its graphs itself."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "graphs"})
        twin.graphs = GraphCache(twin._compute, self.graphs.batch) if self.graphs is not None else None
        if self.compiled:
            compile_parts(twin.folded.backbone)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(f"an optimized model cannot be pickled; {SAVE_ORIGINAL}")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.packed:
            raise UserError(f"an optimized model has no state dict; {SAVE_ORIGINAL}")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError("an optimized model cannot load weights; load them into the original model and optimize it again.")

    def _apply(self, fn: Any, recurse: bool = True) -> "Optimized":
        if self.packed:
            try:
                moved = fn(torch.empty(1, dtype=self.dtype))
            except (RuntimeError, AssertionError):  # the device does not exist here
                moved = None
            if moved is None or moved.dtype != self.dtype or moved.device.type != "cpu":
                raise UserError(
                    "a model packed for the CPU cannot be moved or cast; move or cast the original model and optimize it again."
                )
            return self
        if self.graphs is not None:
            self.graphs.clear()  # they read the weights at their old addresses
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        own = next(self.parameters())
        self.dtype, self.device, self.checked = own.dtype, own.device, None
        return self


def compile_parts(backbone: VisionTransformer) -> None:
    """Compile each block and the stem, as in training: equal blocks share one graph."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 16)  # two kinds of blocks, several shapes
    for block in backbone.layers:
        block.compile()
    if backbone.architecture.stem not in ("linear", "convnet"):  # a single kernel, and blocks that are compiled already
        backbone.stem.compile()


def optimize(
    model: VisionTransformer,
    goal: str = "latency",
    batch_size: int | None = None,
    example: Tensor | None = None,
    tolerance: float = 1e-4,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    graph: bool | None = None,
    precision: str | None = None,
) -> Optimized:
    """A faster copy of the model for inference; the model itself is not changed.

    Args:
        goal: "latency" (few images at once; on a GPU one CUDA graph per shape) or "throughput" (many).
        batch_size: compile and capture for this batch size now instead of at the first call.
        example: images [B, K, height, width] for the same purpose; they are also compared, and int8 is calibrated on them.
        tolerance: largest allowed folding error, relative to the largest logit.
        dtype: float32 or bfloat16; default: the model's.
        compile: use torch.compile; default: on a GPU. Without it, the weights are packed for the CPU.
        graph: use CUDA graphs; default: on a GPU for latency, and for throughput if the batch size is given.
        precision: instead of `dtype`: "fp32", "bf16", "int8" (CPU) or "fp8" (Hopper GPUs).
    """
    if isinstance(model, Optimized):
        raise UserError("this model is already optimized; pass the original model to optimize it with other options.")
    check_arguments(model, goal, batch_size, example, tolerance)
    own = next(model.parameters())
    cuda = own.device.type == "cuda"
    dtype = choose_dtype(own, dtype, precision)
    compiled = cuda if compile is None else compile
    graph_batch = batch_size or (len(example) if example is not None else None) if goal == "throughput" else None
    graphs = (cuda and (goal == "latency" or graph_batch is not None)) if graph is None else graph and cuda
    check_precision(precision, own.device, compiled)
    int8, fp8 = precision == "int8", precision == "fp8"
    warning = (example_warning(example) if example is not None else NO_EXAMPLE) if int8 else None
    packed = own.device.type == "cpu" and not compiled and can_pack(dtype)

    exact = torch.float64 if own.dtype == torch.float64 else torch.float32
    original = copy.deepcopy(model).eval().requires_grad_(False).to(exact)
    folded, notes = fold(copy.deepcopy(original))
    parameters = count(original), count(folded)
    images = [make_check_images(model, model.architecture.image_size).to(own.device, exact)]
    if example is not None:
        images.append(example.to(own.device, exact))
    with torch.no_grad(), disable_tf32(own.device):
        expected = [compute_expected(original, image) for image in images]
        folding_error = worst(difference(folded(image), logits) for image, logits in zip(images, expected, strict=True))
        if not folding_error <= tolerance:
            part = first_difference(original, folded, images[0], tolerance)
            raise UserError(
                f"folding changes the logits by {folding_error:.1e} of the largest, more than tolerance={tolerance:g}, first in "
                f"{part}; use the original model or a larger tolerance."
            )
    unchanged = dtype == exact and not cuda and not compiled and not packed  # it runs exactly as it was just compared
    rounding_error = 0.0 if dtype == exact and not cuda else measure_rounding(original, images, expected, dtype)
    del original

    optimized = Optimized(folded, dtype, compiled, graphs, packed, int8, graph_batch)
    if packed:
        pack(folded, notes, images[-1].to(dtype) if int8 else None)
    if fp8:
        to_float8(folded.backbone, notes)
    if int8:  # compared on the calibration images only
        images, expected = images[-1:], expected[-1:]
    chunk = batch_size or (1 if goal == "latency" and example is None else 0)
    try:
        outputs = run_optimized(optimized, images, chunk)
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"torch.compile does not work on this machine ({reason}); pass compile=False.") from error
    pairs = [(output, logits[: len(output)]) for output, logits in zip(outputs, expected, strict=True)]
    total_error = folding_error if unchanged else worst(difference(*pair) for pair in pairs)
    eps = TF32_EPS if cuda and dtype == torch.float32 else torch.finfo(dtype).eps
    limit = QUANTIZED_TOLERANCE if int8 or fp8 else max(ROUNDING_FACTOR * rounding_error, MIN_EPS * eps, tolerance)
    label = precision if precision in QUANTIZED else DTYPES[dtype]
    if not total_error <= limit:
        advice = ADVICE.get(label, "try compile=False and graph=False")
        raise UserError(
            f"the logits of the optimized model in {label} differ by {total_error:.1e} of the largest from the original's, of "
            f"which folding is only {folding_error:.1e}; use the original model, or {advice}."
        )
    if warning:
        notes.leave(warning)
    same = sum(int((output.argmax(-1) == logits.argmax(-1)).sum()) for output, logits in pairs)
    same_top1 = same, sum(len(output) for output, _ in pairs)
    errors = (folding_error, total_error, rounding_error)
    optimized.report = Report(goal, label, *describe(notes, optimized, cuda), *errors, parameters, same_top1)
    return optimized


def compute_expected(original: VisionTransformer, image: Tensor) -> Tensor:
    """The original model's logits [B, C], which must be finite."""
    logits: Tensor = original(image)
    if not logits.isfinite().all():
        raise UserError("the model's logits are NaN or Inf, so they cannot be compared; check its weights.")
    return logits


def measure_rounding(original: VisionTransformer, images: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
    """Error of the original model when it is computed in `dtype`."""
    half = dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast(images[0].device.type, torch.bfloat16, enabled=half):
        return worst(difference(original(image), logits) for image, logits in zip(images, expected, strict=True))


def run_optimized(optimized: Optimized, images: list[Tensor], chunk: int) -> list[Tensor]:
    """Logits of the optimized network as it will run: an example at once, the fixed images `chunk` at a time.

    With chunk 0 the batch size is unknown, so nothing is compiled for the number of fixed images.
    """
    outputs = []
    for index, image in enumerate(images):
        if index:
            outputs.append(optimized(image))
        elif not chunk:
            with torch.no_grad(), torch.compiler.set_stance("force_eager") if optimized.compiled else nullcontext():
                outputs.append(optimized._compute(image))
        else:
            repeated = image.repeat(-(-chunk // len(image)), 1, 1, 1)[: max(chunk, len(image))]
            logits = [optimized(part) for part in repeated.split(chunk) if len(part) == chunk]
            outputs.append(torch.cat(logits)[: len(image)])
    return outputs


def worst(values: Iterable[float]) -> float:
    """The largest; NaN if any is NaN."""
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def describe(notes: Notes, optimized: Optimized, cuda: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Messages on the applied and the skipped rewrites."""
    applied = [f"{text}: {number}" for text, number in notes.done.items() if number]
    skipped = list(notes.left)
    if optimized.compiled:
        applied.append("blocks compiled by torch.compile")
    if optimized.graphs is not None:
        batch_size = optimized.graphs.batch
        which = f"of up to {MAX_GRAPH_BATCH} images" if batch_size is None else f"of {batch_size} images"
        applied.append(f"CUDA graphs for each shape {which}, {optimized.graphs.captured} captured so far")
        if None in optimized.graphs.known.values():
            skipped.append("a CUDA graph could not be captured; that shape runs without one")
    fused = sum(
        isinstance(part, FoldedFeedForward) and part.exact and type(part.fc1) is nn.Linear for part in optimized.modules()
    )
    if cuda and optimized.dtype == torch.bfloat16 and fused:
        applied.append(f"GELUs fused into the product before them, with the tanh approximation: {fused}")
    if not cuda:
        skipped.append("CUDA graphs: the model is on the CPU")
    return tuple(applied), tuple(skipped)
