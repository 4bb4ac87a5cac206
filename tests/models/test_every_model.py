"""What every model of the catalogue must do: run, differentiate, change size, compile, export."""

from dataclasses import fields
from functools import cache

import pytest
import torch
from torch.export import Dim, export

import vitrail
from tests.small import structures
from vitrail.models.config import Architecture, as_size
from vitrail.models.registry import build, list_models, lookup

PLAIN = Architecture()
STEM = [field.name for field in fields(Architecture) if field.name.startswith("stem_")]
STEM += ["convnet", "patch_size", "image_size"]
FIXED_GRID = ("linear", "mlp")  # mixers tied to their grid until `resize`


def randomize(model):
    """Random weights everywhere: a zero-started head or scale would hide missing gradients."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def loss(outputs):
    heads = (outputs.main, outputs.logits, outputs.distillation, outputs.dense)
    return sum((head.square().mean() for head in heads if head is not None), torch.zeros(()))


def sizes(architecture):
    """The model's own rectangular size, and a square one."""
    return architecture.image_size, as_size(3 * architecture.patch_size)


def any_size(architecture):
    return architecture.mixer not in FIXED_GRID and architecture.pooling != "class_mlp"


@pytest.mark.parametrize("name", list_models())
def test_full_size_on_the_meta_device(name):
    """Forward and backward at the model's size and at a rectangular one; a gradient for every trainable parameter.

    Blocks are alike, so two of them stand for the depth, and two for that of a stage of the stem: one that changes the
    channels, and one that does not.
    """
    whole = lookup(name)[1]
    few = {"depth": min(whole.depth, 2), "stem_layers": tuple(min(layers, 2) for layers in whole.stem_layers)}
    if whole.convnet:
        few["convnet"] = whole.convnet.replace(depths=tuple(min(depth, 2) for depth in whole.convnet.depths))
    model = vitrail.create(name, device="meta", **few).train()
    height, width = model.architecture.image_size
    step = model.architecture.patch_size
    for size in ((height, width), (height - step, width + step)):
        model.resize(*size)
        image = torch.empty(2, 3, *size, device="meta")
        outputs = model.outputs(image)
        assert outputs.logits.shape == (2, 1000)
        sum(head.sum() for head in (outputs.logits, outputs.dense) if head is not None).backward()
        missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not missing
        model.zero_grad()


@pytest.mark.parametrize("name", structures())
def test_gradients_reach_every_parameter(name):
    model = randomize(build(structures()[name])).train()
    for size in sizes(model.architecture):
        if model.architecture.image_size != size and not any_size(model.architecture):
            model.resize(*size)
        model.zero_grad()
        loss(model.outputs(torch.randn(4, 3, *size))).backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
            # A bias on the keys shifts all scores of a query alike, so its true gradient is zero.
            assert parameter.grad.abs().max() > 0 or key.endswith("attention.k.bias"), key


@pytest.mark.parametrize("name", structures())
def test_evaluation_is_deterministic_and_independent_of_the_batch(name):
    model = randomize(build(structures()[name])).eval()
    image = torch.randn(3, 3, *model.architecture.image_size)
    with torch.inference_mode():
        together, again = model(image), model(image)
        alone = torch.cat([model(one[None]) for one in image])
    assert torch.equal(together, again)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", structures())
def test_compiles_as_one_graph(name):
    model = randomize(build(structures()[name])).eval()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    image = torch.randn(2, 3, *model.architecture.image_size)
    torch.testing.assert_close(compiled(image), model(image))


@cache
def exported():
    """Every stem and everything that follows a stem: with two blocks the first time, with one behind another stem."""
    met, stems, found = set(), set(), {}
    for name, architecture in structures().items():
        plain = {"stem": "linear", "depth": max(architecture.depth, 1)} | {field: getattr(PLAIN, field) for field in STEM}
        backbone = architecture.replace(**plain)
        once = architecture.replace(depth=min(architecture.depth, 1), pooling_depth=1)
        if backbone not in met or architecture.stem not in stems:
            found[name] = once if backbone in met else architecture
        met.add(backbone)
        stems.add(architecture.stem)
    return found


@pytest.mark.parametrize("name", exported())
def test_exports_with_dynamic_batch_and_size(name):
    model = randomize(build(exported()[name])).eval()
    height, width = model.architecture.image_size
    step = model.architecture.patch_size
    shapes = {0: Dim("batch", min=1, max=64)}
    other = (5, 3, height, width)
    if any_size(model.architecture):
        shapes |= {2: step * Dim("rows", min=2, max=32), 3: step * Dim("columns", min=2, max=32)}
        other = (5, 3, height + 2 * step, width + step)
    program = export(model, (torch.randn(2, 3, height, width),), dynamic_shapes={"image": shapes})
    image = torch.randn(*other)
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(image), model(image), rtol=1e-4, atol=1e-4)
