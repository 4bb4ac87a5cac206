"""`vitrail.optimize` as a user meets it: same answers, an untouched original, a report, refusals in a message."""

import copy
import functools
import json
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.deploy.inference_graphs import MAX_GRAPH_BATCH, GraphCache
from vitrail.deploy.parity import difference, make_check_images
from vitrail.models.config import Architecture
from vitrail.models.registry import build

SMALL = Architecture(width=32, depth=3, heads=2, branches=2, classes=5, image_size=(8, 12), patch_size=4, residual="layerscale")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def small(**changes):
    return randomize(build(SMALL.replace(**changes)))


@pytest.mark.parametrize("name", structures())
def test_every_structure_in_float32(name):
    model = randomize(build(structures()[name])).eval()
    optimized = vitrail.optimize(model)
    image = torch.randn(2, 3, *model.architecture.image_size)
    with torch.no_grad():
        assert difference(optimized(image), model(image)) <= 1e-4
    assert 0 < optimized.report.folding_error <= 1e-4
    assert optimized.report.applied


def test_the_original_is_untouched():
    model = small(drop_path=0.3, dropout=0.1, stem="hmlp", patch_size=16, image_size=(32, 32)).train()
    model.blocks[0].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    optimized = vitrail.optimize(model)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.requires_grad for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    ours = {value.data_ptr() for value in model.state_dict().values()}
    assert not ours & {value.data_ptr() for value in optimized.parameters()}
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(optimized(image), optimized(image))
    assert not optimized(image).requires_grad
    assert difference(optimized(image), model.eval()(image).detach()) < 1e-4


def test_the_output_can_be_used_in_a_loss():
    """No inference tensor comes out: an optimized teacher's logits go into a student's loss."""
    optimized = vitrail.optimize(small())
    with torch.inference_mode():
        optimized(torch.randn(2, 3, 8, 12))
    weight = torch.ones(5, requires_grad=True)
    (optimized(torch.randn(2, 3, 8, 12)) * weight).sum().backward()
    assert weight.grad is not None


def test_the_report():
    report = vitrail.optimize(small(), batch_size=2).report
    assert report.goal == "latency"
    assert report.precision == "float32"
    assert "residuals whose parallel branches became one: 6" in report.applied
    assert any("CUDA graphs" in message for message in report.skipped)
    assert "error relative to the largest logit" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["folding_error"] == report.folding_error


def test_bfloat16_and_back():
    model = small().eval()
    optimized = vitrail.optimize(model, dtype=torch.bfloat16)
    image = torch.randn(2, 3, 8, 12)
    assert {parameter.dtype for parameter in optimized.parameters()} == {torch.bfloat16}
    assert optimized(image).dtype == torch.float32
    assert optimized.report.precision == "bfloat16"
    assert 1e-5 < optimized.report.rounding_error < 0.2
    assert 1e-5 < optimized.report.total_error <= max(4 * optimized.report.rounding_error, 16 * 2**-7)
    assert optimized.report.folding_error < 1e-5
    # A model that is in bfloat16 already: its weights are multiplied before they are rounded again.
    own = vitrail.optimize(copy.deepcopy(model).bfloat16())
    assert own.report.precision == "bfloat16"
    assert own.report.folding_error < 1e-5


def test_an_example_of_another_size_is_compared_too():
    model = small()
    optimized = vitrail.optimize(model, "throughput", example=torch.randn(3, 3, 16, 20))
    assert optimized(torch.randn(1, 3, 16, 20)).shape == (1, 5)


def test_compiled_parts_answer_alike(monkeypatch):
    """With a backend that needs no C++ compiler. All blocks but the last, which computes less, are one graph."""
    graphs = []
    backend = functools.partial(torch.nn.Module.compile, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: backend(module))
    torch.compiler.reset()
    model = small(depth=6).eval()
    optimized = vitrail.optimize(model, compile=True, batch_size=2)
    image = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        assert difference(optimized(image), model(image)) < 1e-4
    torch.compiler.reset()
    assert len(graphs) == 2
    assert "blocks compiled by torch.compile" in optimized.report.applied


def test_a_difference_is_refused_and_its_place_named():
    """A large shift that the next product cancels: the original has rounded the tokens by then, the folded network has not."""
    model = small(branches=1)
    branch = model.blocks[1].ffn.branches[0]
    with torch.no_grad():
        branch.norm.bias.fill_(1e5)
        branch.body.fc1.weight -= branch.body.fc1.weight.mean(1, keepdim=True)
    with pytest.raises(vitrail.UserError, match="first in block 1; use the original model"):
        vitrail.optimize(model)
    assert vitrail.optimize(model, tolerance=1.0).report.folding_error > 1e-4


def test_answers_that_are_no_numbers():
    model = small()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(vitrail.UserError, match="NaN or Inf"):
        vitrail.optimize(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"goal": "speed"}, "latency, throughput"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 1.5}, "at least 1"),
        ({"tolerance": 0}, "positive"),
        ({"tolerance": float("nan")}, "positive"),
        ({"dtype": torch.float16}, "float32 or bfloat16"),
        ({"precision": "fp16"}, "fp32, bf16, int8"),
        ({"precision": "bf16", "dtype": torch.float32}, "pass only one of them"),
        ({"precision": "int8", "compile": True}, "remove compile=True"),
        ({"example": torch.randn(3, 8, 12)}, r"\[batch, 3, height, width\]"),
        ({"example": torch.randn(1, 1, 8, 12)}, r"\[batch, 3, height, width\]"),
        ({"example": "cat.jpg"}, "not a str"),
        ({"example": torch.randn(1, 3, 2, 2)}, "smaller than a patch"),
        ({"example": torch.randn(0, 3, 8, 12)}, "at least one"),
        ({"example": torch.full((1, 3, 8, 12), torch.nan)}, "NaN or Inf"),
        ({"precision": "int8", "example": torch.zeros(4, 3, 8, 12)}, "a single color"),
        ({"precision": "int8", "example": torch.randn(4, 3, 1, 1).expand(4, 3, 8, 12)}, "or no example"),
        ({"example": torch.zeros(1, 3, 8, 12, dtype=torch.uint8)}, "floating-point, not torch.uint8"),
    ],
)
def test_wrong_arguments(options, said):
    with pytest.raises(vitrail.UserError, match=said):
        vitrail.optimize(small(), **options)


def test_invalid_models():
    with pytest.raises(vitrail.UserError, match="not Linear"):
        vitrail.optimize(torch.nn.Linear(2, 2))
    with pytest.raises(vitrail.UserError, match="meta"):
        vitrail.optimize(vitrail.create("deit_tiny_patch16", device="meta"))
    with pytest.raises(vitrail.UserError, match="cannot be trained"):
        vitrail.optimize(small()).train()
    fixed = small(mixer="linear", pooling="mean")
    with pytest.raises(vitrail.UserError, match="for a grid of"):
        vitrail.optimize(fixed, example=torch.randn(1, 3, 16, 16))
    with pytest.raises(vitrail.UserError, match="already optimized"):
        vitrail.optimize(vitrail.optimize(small()))


# On a processor packed, and as elsewhere: by torch's own products.
KINDS = {"packed": {}, "int8": {"precision": "int8"}, "bare": {"dtype": torch.float64}}


@pytest.fixture(params=KINDS)
def optimized(request):
    found = vitrail.optimize(small(), **KINDS[request.param])
    assert found.packed == (request.param != "bare")
    return found


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (
            torch.randn(3, 8, 12),
            r"tensor \[batch, 3, height, width\], not one of shape \(3, 8, 12\); a single image is image\[None\]",
        ),
        (torch.randn(8, 12), r"not one of shape \(8, 12\)\.$"),
        (torch.randn(1, 1, 8, 12), r"not one of shape \(1, 1, 8, 12\)\.$"),
        (torch.randn(1, 8, 12, 3), r"permute\(0, 3, 1, 2\) has the channels first"),
        (torch.randn(1, 3, 2, 2), "2 x 2 pixels are smaller than a patch of 4; use larger images"),
        (torch.zeros(1, 3, 8, 12, dtype=torch.uint8), "not torch.uint8; divide pixels by 255"),
        (torch.zeros(1, 3, 8, 12, dtype=torch.int64), "not torch.int64"),
        (torch.zeros(1, 3, 8, 12, device="meta"), "images are on meta and the model is on cpu"),
        (torch.zeros(1, 3, 8, 12).numpy(), "not a ndarray"),
        ("cat.jpg", "not a str"),
        (None, "not a NoneType"),
    ],
)
def test_invalid_inputs(optimized, image, said):
    for _ in range(2):  # what was refused once is not taken for known
        with pytest.raises(vitrail.UserError, match=said):
            optimized(image)
    assert optimized(torch.randn(2, 3, 8, 12).half()).shape == (2, 5)


@pytest.mark.parametrize("name", structures())
def test_other_sizes_are_answered_or_refused_as_by_the_model(name):
    model = randomize(build(structures()[name])).eval()
    optimized = vitrail.optimize(model)
    height, width = model.architecture.image_size
    image = torch.randn(1, 3, 2 * height, width)
    try:
        expected = model(image).detach()
    except vitrail.UserError:
        with pytest.raises(vitrail.UserError, match=rf"call resize\({2 * height}, {width}\) of the original model"):
            optimized(image)
        resized = vitrail.optimize(model.resize(2 * height, width))
        assert difference(resized(image), model(image).detach()) <= 1e-4
    else:
        assert difference(optimized(image), expected) <= 1e-4


@pytest.mark.parametrize("name", ["features", "outputs", "trace", "resize", "embed", "blocks", "head", "stem", "grid"])
def test_parts_that_only_a_model_has(optimized, name):
    assert hasattr(small(), name)
    with pytest.raises(vitrail.UserError, match=f"an optimized model has no {name}; use the original model"):
        getattr(optimized, name)
    assert not hasattr(optimized, name)


def test_names_that_nothing_has(optimized):
    with pytest.raises(AttributeError, match="no attribute 'feature'") as caught:
        optimized.feature  # noqa: B018
    assert not isinstance(caught.value, vitrail.UserError)


def test_it_cannot_be_saved(optimized, tmp_path):
    for keep in (pickle.dumps, lambda each: torch.save(each, tmp_path / "fast.pt")):
        with pytest.raises(vitrail.UserError, match=r"cannot be pickled; save the original model with vitrail\.save"):
            keep(optimized)
    with pytest.raises(vitrail.UserError, match="cannot load weights"):
        optimized.load_state_dict({})
    with pytest.raises(vitrail.UserError):
        vitrail.save(optimized, tmp_path / "fast.safetensors")
    assert not (tmp_path / "fast.safetensors").exists()


def test_packed_models_cannot_be_saved_moved_or_exported(tmp_path):
    optimized = vitrail.optimize(small())
    for format in ("vitrail", "timm"):
        with pytest.raises(vitrail.UserError, match=r"save the model before vitrail\.optimize"):
            vitrail.save(optimized, tmp_path / "fast.safetensors", format)
    for place in ("cuda", "cuda:7", "mps", "meta"):  # whether there is one or not
        with pytest.raises(vitrail.UserError, match="cannot be moved or cast"):
            optimized.to(place)
    with pytest.raises(vitrail.UserError, match="cannot be exported"):
        torch.export.export(optimized, (torch.randn(2, 3, 8, 12),))


def test_what_is_not_packed_may_be_exported_and_compiled():
    optimized = vitrail.optimize(small(), dtype=torch.float64)
    image = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    exported = torch.export.export(optimized, (image,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    assert torch.allclose(exported.module()(image[:1]), optimized(image[:1]))
    compiled = torch.compile(lambda x: optimized(x) + 1, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(image), optimized(image) + 1)
    torch.compiler.reset()


def test_a_deep_copy_answers_by_itself(optimized):
    optimized.graphs = GraphCache(optimized._compute, 2)  # as on a GPU: they hold a lock, and a network to ask
    twin = copy.deepcopy(optimized)
    image = torch.randn(2, 3, 8, 12)
    assert torch.equal(twin(image), optimized(image))
    assert twin.graphs is not optimized.graphs
    assert twin.graphs.compute.__self__ is twin
    assert twin.graphs.batch == 2
    assert twin.report == optimized.report
    if not optimized.packed:  # what is packed never changes, and may be shared
        assert not {each.data_ptr() for each in twin.parameters()} & {each.data_ptr() for each in optimized.parameters()}


def test_a_deep_copy_compiles_for_itself(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    twin = copy.deepcopy(vitrail.optimize(small(), compile=True))
    assert compiled[-3:] == list(twin.folded.backbone.blocks)
    assert len({id(each) for each in compiled}) == 6


def test_check_images_are_fixed_and_of_two_kinds():
    model = small()
    images = make_check_images(model, (32, 48))
    assert torch.equal(images, make_check_images(model, (32, 48)))
    steps = (images[..., 1:] - images[..., :-1]).square().mean((1, 2, 3)) / images.var((1, 2, 3))
    assert steps[:2].min() > 1.5  # noise: neighbours have nothing in common
    assert steps[2:].max() < 0.3


def test_no_graphs_on_the_cpu():
    graphs = GraphCache(lambda image: image + 1)
    assert torch.equal(graphs(torch.zeros(2)), torch.ones(2))
    assert graphs.captured == 0


def test_the_benchmark(tmp_path, monkeypatch, capsys):
    out = tmp_path / "optimize.json"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    words = "vit_tiny_patch16_1x2 --device cpu --dtype float32 --batch-sizes 1 --rounds 2 --repeats 1 --out"
    monkeypatch.setattr(sys, "argv", ["optimize.py", *words.split(), str(out)])
    runpy.run_path(str(BENCHMARKS / "optimize.py"), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["eager", "optimized"]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert rows[1]["report"]["folding_error"] < 1e-4
    assert "batch size   1  optimized" in capsys.readouterr().out


def test_the_example_of_the_documentation(capsys):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "optimize.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    *lines, last = capsys.readouterr().out.splitlines()
    *expected, end = shown.splitlines()
    # oneDNN and the compiler are not on all machines.
    assert [line for line in lines if "oneDNN" not in line and "kernel" not in line] == [
        line for line in expected if "oneDNN" not in line and "kernel" not in line
    ]
    assert last.startswith(end.partition(" …")[0])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", structures())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_on_a_gpu(name, dtype):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = randomize(build(structures()[name])).cuda().eval()
    optimized = vitrail.optimize(model, dtype=dtype, compile=False)
    assert optimized.graphs.captured == 1
    limit = 1e-4 if dtype == torch.float32 else 0.2
    for batch in (1, 3, 1, MAX_GRAPH_BATCH + 1):
        image = torch.randn(batch, 3, *model.architecture.image_size, device="cuda")
        first, kept = optimized(image), optimized(image)
        optimized(torch.randn_like(image))  # must not write over an answer that was given
        assert torch.equal(first, kept)
        with torch.no_grad():
            assert difference(first, model(image)) <= limit
    assert optimized.graphs.captured == 2


@pytest.mark.gpu
@needs_gpu
def test_streams_and_casts_on_a_gpu():
    model = small().cuda().eval()
    optimized = vitrail.optimize(model, compile=False)
    images = torch.randn(8, 1, 3, 8, 12, device="cuda")
    expected = [optimized(image) for image in images]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in images]
    found = []
    for image, stream in zip(images, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(optimized(image))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with torch.autocast("cuda", torch.bfloat16):
        assert optimized(images[0]).dtype == torch.bfloat16
    with torch.inference_mode():
        optimized(images[0])
    assert torch.equal(optimized(images[0]), expected[0])
    optimized.double()
    assert optimized(images[0]).dtype == torch.float64


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_compiled_on_a_gpu(goal):
    torch.compiler.reset()
    model = small().cuda().eval()
    optimized = vitrail.optimize(model, goal, batch_size=4)
    image = torch.randn(4, 3, 8, 12, device="cuda")
    with torch.no_grad():
        assert difference(optimized(image), model(image)) < 1e-2
    assert "blocks compiled by torch.compile" in optimized.report.applied
