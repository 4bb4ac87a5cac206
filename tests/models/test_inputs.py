"""A network is given what it cannot answer: one sentence, whatever the stem, and nothing in the graphs of compilers."""

import pytest
import torch

import vitrail
from vitrail.errors import UserError

NAMES = ("deit_tiny_patch16", "resmlp_s12", "lvvit_t", "vit_base_r50_s16")
WRONG = {
    "one image": (torch.randn(3, 64, 64), r"not one of shape \(3, 64, 64\); a single image is image\[None\]\.$"),
    "two dimensions": (torch.randn(64, 64), r"not one of shape \(64, 64\)\.$"),
    "channels": (torch.randn(1, 1, 64, 64), r"tensor \[batch, 3, height, width\], not one of shape \(1, 1, 64, 64\)\.$"),
    "channels last": (torch.randn(1, 64, 64, 3), r"permute\(0, 3, 1, 2\) has the channels first"),
    "bytes": (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "not torch.uint8; divide pixels by 255"),
    "tiny": (torch.randn(1, 3, 0, 64), "0 x 64 pixels are smaller than a patch of 16; use larger images"),
    "a list": ([1.0], "not a list"),
    "an array": (torch.randn(1, 3, 64, 64).numpy(), "not a ndarray"),
}


def small(name, **changes):
    return vitrail.create(name, 5, 64, depth=1, **changes).eval()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_one_sentence(name, wrong):
    image, said = WRONG[wrong]
    model = small(name)
    for answer in (model, model.outputs, model.features, model.trace):
        with pytest.raises(UserError, match=said):
            answer(image)


def test_a_fixed_grid():
    model = small("resmlp_s12")
    with pytest.raises(UserError, match=r"3 x 2 patches, .* grid of 4 x 4; call resize\(48, 32\) of the model first"):
        model(torch.randn(1, 3, 48, 32))
    assert model.resize(48, 32)(torch.randn(1, 3, 48, 32)).shape == (1, 5)


@pytest.mark.parametrize("name", NAMES)
def test_what_can_be_answered(name):
    model = small(name)
    for count in (0, 1, 3):
        assert model(torch.randn(count, 3, 64, 64)).shape == (count, 5)
    if name != "resmlp_s12":
        assert model(torch.randn(1, 3, 70, 40)).shape == (1, 5)
    assert model.double()(torch.randn(1, 3, 64, 64).double()).shape == (1, 5)
    assert small(name, channels=1)(torch.randn(1, 1, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_takes_other_sizes(strict):
    model, size = small("deit_tiny_patch16"), torch.export.Dim
    shapes = {0: size("count", max=64), 2: 16 * size("rows", max=16), 3: 16 * size("columns", max=16)}
    program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=(shapes,), strict=strict)
    image = torch.randn(3, 3, 48, 32)
    assert torch.allclose(program.module()(image), model(image), atol=1e-5)


def test_a_compiled_graph_has_no_condition_of_it():
    """Other numbers of images are the same graph."""
    graphs = []
    model = small("deit_tiny_patch16")
    torch.compiler.reset()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True, dynamic=True)
    for count in (2, 3, 5):
        image = torch.randn(count, 3, 64, 64)
        assert torch.allclose(compiled(image), model(image), atol=1e-5)
    torch.compiler.reset()
    assert len(graphs) == 1
