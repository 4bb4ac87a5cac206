"""`vitrail.optimize`: the same answers, sooner. The network is folded, compiled and captured or packed, and compared."""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.deploy.float8 import to_float8
from vitrail.deploy.fold import Notes, fold
from vitrail.deploy.folded_layers import Folded, WideFeedForward
from vitrail.deploy.inference_graphs import LARGEST, Graphs
from vitrail.deploy.onednn import can_pack, pack
from vitrail.deploy.options import DTYPES, RESIZED, check_arguments, check_precision, check_told, choose_dtype
from vitrail.deploy.parity import check_images, difference, first_difference, full_products
from vitrail.errors import UserError
from vitrail.layers.kernels import exporting
from vitrail.models.inputs import check_given
from vitrail.models.vision_transformer import VisionTransformer

# A rewritten network rounds elsewhere: it may be this much farther from the exact answer than the original is in the same
# precision, or this many units of that precision, whichever is more.
FARTHER, UNITS = 4.0, 16.0
EIGHT = ("int8", "fp8")
ADVICE = {"int8": "give more images like yours as the example, or use bf16", "fp8": "use bf16"}
UNTOLD = "ranges of eight bits learned from real images: no example was given, they are those of made-up ones"
COARSE = 0.25  # eight bits: a difference that no network with a clear answer should show
KEEP = "save the model it was made from with vitrail.save, and optimize that where it runs."
TF32 = 2.0**-10  # the unit of what GPUs may compute float32 products in, convolutions by default


@dataclass(frozen=True)
class Report:
    """What was done to a model, what was left and why, and how far its answers moved on fixed images.

    Differences are the largest of any logit, as a share of the largest logit. `folding` is that of the rewritten network in
    float32; `running` that of the network as it runs, in its precision; `rounding` that of the original in the same precision.
    """

    aim: str
    precision: str
    done: tuple[str, ...]
    left: tuple[str, ...]
    folding: float
    running: float
    rounding: float
    parameters: tuple[int, int]  # before and after
    alike: tuple[int, int]  # images with the same first answer, of how many that `running` has compared

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        lines = [f"optimized for {self.aim} in {self.precision}"]
        lines += [f"  done  {sentence}" for sentence in self.done]
        lines += [f"  left  {sentence}" for sentence in self.left]
        moved = f"  largest difference to the original: {self.running:.1e} of the largest logit, {self.folding:.1e} from folding"
        if self.rounding:
            moved += f"; the original in {self.precision} is {self.rounding:.1e} from itself in full precision"
        if self.precision in EIGHT:
            moved += f"; the same first answer for {self.alike[0]} of {self.alike[1]} images"
        return "\n".join([*lines, moved])


class NoPart(UserError, AttributeError):
    """Also what Python expects of a name that is not there, so that `hasattr` answers."""


class Optimized(nn.Module):
    """A network that only answers: images [B, K, height, width] to logits [B, C], as the model it was made from.

    It does not learn and is not saved: keep the original and optimize it after loading. `report` says what was done.
    """

    report: Report

    def __init__(
        self,
        folded: Folded,
        dtype: torch.dtype,
        compiled: bool,
        graphs: bool,
        packed: bool = False,
        coded: bool = False,
        batch: int | None = None,
    ):
        super().__init__()
        self.folded, self.dtype, self.packed, self.coded = folded.to(dtype), dtype, packed, coded
        trunk = folded.trunk
        self.architecture, self.preprocessing, self.class_names = trunk.architecture, trunk.preprocessing, trunk.class_names
        self.name, self.compiled = trunk.name, compiled
        self.place = next(folded.parameters()).device
        self.known: tuple | None = None  # shape, type and place of images that were found right: the next are mostly alike
        self.graphs = Graphs(self._compute, batch) if graphs else None
        super().train(False)
        if compiled:
            compile_parts(trunk)

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a caller's compiler would make conditions of its graph from these
            self._check(image)
        if self.packed:
            if exporting():
                raise UserError("a model packed for a processor is not exported; export the model it was made from.")
            return self._uncompiled(image)
        return self._compute(image) if self.graphs is None else self.graphs(image)

    def _check(self, image: Tensor) -> None:
        kind = (image.shape, image.dtype, image.device) if isinstance(image, Tensor) else None
        if kind is None or kind != self.known:
            trunk = self.folded.trunk
            check_given(image, trunk.architecture, trunk.stem, trunk.grid, resized=RESIZED)
            if image.device != self.place:
                raise UserError(f"the images are on {image.device} and the model is on {self.place}; move the images there.")
            self.known = kind

    @torch.compiler.disable
    def _uncompiled(self, image: Tensor) -> Tensor:
        """What was packed is nothing that torch.compile of a caller could read."""
        if not len(image):  # the library's products in eight bits need a row
            return self._compute(image.new_zeros(1, *image.shape[1:]))[:0]
        return self._compute(image)

    def _compute(self, image: Tensor) -> Tensor:
        logits = self.folded(image.to(self.dtype))
        if self.coded:  # eight bits have no code for what is not a number, and an answer must not come of it
            logits = logits + image.flatten(1).sum(1).mul(0.0)[:, None]
        return logits.float() if self.dtype == torch.bfloat16 else logits

    def train(self, mode: bool = True) -> "Optimized":
        if mode:
            raise UserError("an optimized model only answers; train the model it was made from and optimize that again.")
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "folded" not in self._modules or not hasattr(self.folded.trunk, name):
                raise
        raise NoPart(f"an optimized model only answers and has no {name}; use that of the model it was made from.")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Optimized":
        """Another one, which compiles and captures for itself."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "graphs"})
        twin.graphs = Graphs(twin._compute, self.graphs.batch) if self.graphs is not None else None
        if self.compiled:
            compile_parts(twin.folded.trunk)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(f"an optimized model is not pickled; {KEEP}")

    def state_dict(self, *words: Any, **named: Any) -> Any:
        if self.packed:
            raise UserError(f"an optimized model is not saved; {KEEP}")
        return super().state_dict(*words, **named)

    def load_state_dict(self, *words: Any, **named: Any) -> Any:
        raise UserError("an optimized model takes no other weights; load them into the model it was made from and optimize that.")

    def _apply(self, fn: Any, recurse: bool = True) -> "Optimized":
        if self.packed:
            try:
                found = fn(torch.empty(1, dtype=self.dtype))
            except (RuntimeError, AssertionError):  # there is no such place here
                found = None
            if found is None or found.dtype != self.dtype or found.device.type != "cpu":
                raise UserError(
                    "a model packed for a processor keeps its precision and place; move or cast the original and optimize that."
                )
            return self
        if self.graphs is not None:
            self.graphs.forget()  # they read the weights where they were
        super()._apply(fn, recurse)
        own = next(self.parameters())
        self.dtype, self.place, self.known = own.dtype, own.device, None
        return self


def compile_parts(trunk: VisionTransformer) -> None:
    """Part by part, as in training: blocks are alike, so one graph serves all of them."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 16)  # two kinds of blocks, and several shapes
    for block in trunk.blocks:
        block.compile()
    if trunk.architecture.stem != "linear":  # which is one kernel already
        trunk.stem.compile()


def optimize(
    model: VisionTransformer,
    for_: str = "latency",
    batch: int | None = None,
    example: Tensor | None = None,
    tolerance: float = 1e-4,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    graph: bool | None = None,
    precision: str | None = None,
) -> Optimized:
    """A copy of the model for inference; the model itself is left as it is.

    `for_` "latency" or "throughput": few images at once (on a GPU by CUDA graphs, one per shape) or many. `batch` or `example`
    [B, K, height, width]: what it will be given, prepared now instead of at the first call; an example is compared, too.
    `tolerance`: the largest allowed difference by folding, as a share of the largest logit. `precision`: "fp32", "bf16" or, on a
    processor, "int8", whose ranges are learned from the example, or on a Hopper GPU "fp8"; or `dtype`: float32 or bfloat16, the
    model's own by default. `compile`, `graph`: torch.compile and CUDA graphs, by default on a GPU (graphs for latency, and for
    throughput where the batch is known); without compile a processor's weights are packed.
    """
    if isinstance(model, Optimized):
        raise UserError("this model is optimized already; to do it otherwise, give the model it was made from.")
    check_arguments(model, for_, batch, example, tolerance)
    own = next(model.parameters())
    cuda = own.device.type == "cuda"
    dtype = choose_dtype(own, dtype, precision)
    compiled = cuda if compile is None else compile
    many = batch or (len(example) if example is not None else None) if for_ == "throughput" else None
    graphs = (cuda and (for_ == "latency" or many is not None)) if graph is None else graph and cuda
    check_precision(precision, own.device, compiled)
    coded, floating = precision == "int8", precision == "fp8"
    untold = check_told(example) if coded and example is not None else UNTOLD
    packed = own.device.type == "cpu" and not compiled and can_pack(dtype)

    exact = torch.float64 if own.dtype == torch.float64 else torch.float32
    original = copy.deepcopy(model).eval().requires_grad_(False).to(exact)
    folded, notes = fold(copy.deepcopy(original))
    parameters = count(original), count(folded)
    images = [check_images(model, model.architecture.image_size).to(own.device, exact)]
    if example is not None:
        images.append(example.to(own.device, exact))
    with torch.no_grad(), full_products(own.device):
        expected = [ask_original(original, image) for image in images]
        folding = worst(difference(folded(image), answer) for image, answer in zip(images, expected, strict=True))
        if not folding <= tolerance:
            place = first_difference(original, folded, images[0], tolerance)
            raise UserError(
                f"folding changes the answers by {folding:.1e} of the largest, more than tolerance={tolerance:g}, and first in "
                f"{place}; use the original model, or allow more."
            )
    same = dtype == exact and not cuda and not compiled and not packed  # it will run as it has just been compared
    rounding = 0.0 if dtype == exact and not cuda else measure_rounding(original, images, expected, dtype)
    del original

    optimized = Optimized(folded, dtype, compiled, graphs, packed, coded, many)
    if packed:
        pack(folded, notes, images[-1].to(dtype) if coded else None)
    if floating:
        to_float8(folded.trunk, notes)
    if coded:  # images unlike those that the ranges were learned from are not what it is for
        images, expected = images[-1:], expected[-1:]
    portion = batch or (1 if for_ == "latency" and example is None else 0)
    try:
        found = run_optimized(optimized, images, portion)
    except torch._dynamo.exc.TorchDynamoException as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"torch.compile does not work on this machine ({said}); give compile=False.") from error
    pairs = [(one, answer[: len(one)]) for one, answer in zip(found, expected, strict=True)]
    running = folding if same else worst(difference(*pair) for pair in pairs)
    unit = TF32 if cuda and dtype == torch.float32 else torch.finfo(dtype).eps
    limit = COARSE if coded or floating else max(FARTHER * rounding, UNITS * unit, tolerance)
    kind = precision if precision in EIGHT else DTYPES[dtype]
    if not running <= limit:
        advice = ADVICE.get(kind, "try compile=False and graph=False")
        raise UserError(
            f"the optimized model's answers in {kind} are {running:.1e} of the largest from the original's, though "
            f"folding changes them by {folding:.1e} only; use the original model, or {advice}."
        )
    if coded and untold:
        notes.leave(untold)
    done, left = describe(notes, optimized, cuda)
    alike = sum(int((one.argmax(-1) == answer.argmax(-1)).sum()) for one, answer in pairs), sum(len(one) for one, _ in pairs)
    optimized.report = Report(for_, kind, done, left, folding, running, rounding, parameters, alike)
    return optimized


def ask_original(original: VisionTransformer, image: Tensor) -> Tensor:
    answer = original(image)
    if not answer.isfinite().all():
        raise UserError("the model's own answers are not finite numbers, so there is nothing to keep; look at its weights.")
    return answer


def measure_rounding(original: VisionTransformer, images: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
    """How far the original is from its exact answers in the precision that was asked for."""
    half = dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast(images[0].device.type, torch.bfloat16, enabled=half):
        return worst(difference(original(image), answer) for image, answer in zip(images, expected, strict=True))


def run_optimized(optimized: Optimized, images: list[Tensor], portion: int) -> list[Tensor]:
    """The optimized network as it will run: an example as it is, our images `portion` at a time.

    With portion 0 nobody has said how many there will be, and nothing is compiled for our number of them.
    """
    found = []
    for index, image in enumerate(images):
        if index:
            found.append(optimized(image))
        elif not portion:
            with torch.no_grad(), torch.compiler.set_stance("force_eager") if optimized.compiled else nullcontext():
                found.append(optimized._compute(image))
        else:
            enough = image.repeat(-(-portion // len(image)), 1, 1, 1)[: max(portion, len(image))]
            answers = [optimized(part) for part in enough.split(portion) if len(part) == portion]
            found.append(torch.cat(answers)[: len(image)])
    return found


def worst(values: Any) -> float:
    """The largest; not a number if any is not."""
    found = list(values)
    return math.nan if any(math.isnan(value) for value in found) else max(found)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def describe(notes: Notes, optimized: Optimized, cuda: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    done = [f"{sentence}: {number}" for sentence, number in notes.done.items() if number]
    left = list(notes.left)
    if optimized.compiled:
        done.append("blocks compiled by torch.compile")
    if optimized.graphs is not None:
        many = optimized.graphs.batch
        which = f"of up to {LARGEST} images" if many is None else f"of {many} images"
        done.append(f"CUDA graphs for each shape {which}, {optimized.graphs.captured} captured so far")
        if None in optimized.graphs.known.values():
            left.append("a CUDA graph could not be captured; that shape is computed as usual")
    inside = sum(isinstance(part, WideFeedForward) and part.exact and type(part.fc1) is nn.Linear for part in optimized.modules())
    if cuda and optimized.dtype == torch.bfloat16 and inside:
        done.append(f"GELUs inside the product before them, by the formula with a tanh: {inside}")
    if not cuda:
        left.append("CUDA graphs: the model is on the CPU")
    return tuple(done), tuple(left)
