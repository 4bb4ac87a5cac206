"""Parallel branches as one while training: same outputs, gradients and random numbers as one after the other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models.test_every_model import randomize
from vitrail.layers import fused
from vitrail.layers.fused import fuse_branches
from vitrail.models.config import Architecture
from vitrail.models.registry import build

TINY = Architecture(width=32, depth=2, heads=2, branches=2, classes=5, image_size=(32, 48))
without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FIXED = torch.Generator().manual_seed(0)
IMAGE = torch.randn(6, 3, 32, 48, dtype=torch.float64, generator=FIXED)
ANSWER = torch.randn(6, 5, dtype=torch.float64, generator=FIXED)


@pytest.fixture
def joined(monkeypatch):
    """For each residual in turn, whether its branches ran as one."""
    results = []
    original = fused.fused_branches

    def recorded(branches, x):
        out = original(branches, x)
        results.append(out is not None)
        return out

    monkeypatch.setattr(fused, "fused_branches", recorded)
    return results


def passes(model, image=IMAGE, answer=ANSWER, dtype=None):
    """Logits and all gradients of one step, with the same seed every time."""
    torch.manual_seed(3)
    with torch.autocast(image.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(image)
        loss = F.mse_loss(logits.double(), answer)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return {"logits": logits.detach()} | dict(zip(names, gradients, strict=True))


def far(found, wanted):
    """The largest difference of any tensor, as a share of the norm; the bias before a softmax has no gradient but rounding."""
    return max(((found[name] - value).norm() / value.norm().clamp_min(1e-8)).item() for name, value in wanted.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"residual": "layerscale", "drop_path": 0.4},
        {"drop_path": 0.4, "drop_path_schedule": "linear", "qkv_bias": False},
        {"branches": 3, "residual": "affine", "drop_path": 0.3, "activation": "gelu_tanh"},
        {"residual": "scalar", "activation": "silu"},
        {"residual": "constant", "drop_path": 0.3, "mlp_ratio": 0.0},
        {"residual": "layerscale", "mixer": "none", "pooling": "mean"},
    ],
    ids=str,
)
def test_same_outputs_and_gradients(changes, joined):
    model = randomize(build(TINY.replace(**changes))).double().train()
    names, wanted = list(model.state_dict()), passes(model)
    fuse_branches(model)
    found = passes(model)
    assert len(joined) == sum(len(block.residuals()) for block in model.blocks)
    assert all(joined)
    assert list(model.state_dict()) == names
    assert far(found, wanted) < 1e-10
    model.recompute = True
    assert far(passes(model), wanted) < 1e-10
    fuse_branches(model, False)
    joined.clear()
    model.recompute = False
    assert all(torch.equal(value, wanted[name]) for name, value in passes(model).items())
    assert not joined


@pytest.mark.parametrize("residual", ["plain", "layerscale"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_gpu])])
def test_bfloat16_is_as_accurate(residual, device):
    """Both ways against float64, each kind of a branch's parameters by itself: at most twice as far."""
    a = TINY.replace(width=96, heads=3, depth=4, residual=residual, drop_path=0.2)
    model = randomize(build(a)).to(device).train()
    if residual == "layerscale":
        for name, parameter in model.named_parameters():
            if "scale" in name:
                nn.init.normal_(parameter, 0.0, 0.3)
    image, answer = IMAGE.to(device), ANSWER.to(device)
    wanted = passes(copy.deepcopy(model).double(), image, answer)
    errors = []
    for join in (False, True):
        found = passes(fuse_branches(model, join), image.float(), answer, torch.bfloat16)
        errors.append({name: ((found[name] - value).norm() / value.norm()).item() for name, value in wanted.items()})
    plain, joined = errors
    assert joined["logits"] < 2 * plain["logits"]
    for kind in {name.split(".", 5)[-1] for name in wanted if ".branches." in name}:
        ours, theirs = (sum(error for name, error in each.items() if name.endswith(kind)) for each in (joined, plain))
        assert ours < 2 * theirs, kind
    assert sum(joined.values()) < 1.5 * sum(plain.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer": "talking_heads"},
        {"pos_embed": "relative_bias", "pos_embed_place": "shared"},
        {"dropout": 0.1},
        {"attention_dropout": 0.1},
        {"norm": "batch"},
        {"norm_place": "post"},
        {"residual": "fixup"},
        {"drop_path": 0.5, "drop_path_kind": "skip"},
        {"branches": 1},
    ],
    ids=str,
)
def test_unsupported_branches_run_separately(changes, joined):
    model = randomize(build(TINY.replace(**changes))).double().train()
    wanted = passes(model)
    found = passes(fuse_branches(model))
    assert far(found, wanted) < 1e-10
    assert any(joined) == bool({"mixer", "attention_dropout"} & set(changes))  # the MLPs can be joined nevertheless
    assert any(joined) or all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_branches_run_separately_where_they_must(joined):
    """In evaluation and trace, with hooks, for export and in float16."""
    model = fuse_branches(randomize(build(TINY))).train()
    image = IMAGE.float()
    model.trace(image)
    model.eval()(image)
    assert not joined
    seen = []
    handle = model.block(1).ffn.branches[1].body.fc1.register_forward_hook(lambda *_: seen.append(1))
    model.train()(image)
    handle.remove()
    assert (seen, joined) == ([1], [True, True, True, False])
    joined.clear()
    with torch.autocast("cpu", torch.float16):
        model(image)
    assert joined == 4 * [False]
    program = torch.export.export(model, (image,))
    assert sum("scaled_dot_product" in str(node.target) for node in program.graph.nodes) == 4


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(("part", "places"), [("mix", [False, True]), ("ffn", [True, False])])
@pytest.mark.parametrize("instead", [nn.Identity, Twice], ids=["nothing", "something"])
def test_another_module_in_place_of_dropout(part, places, instead, joined):
    model = randomize(build(TINY)).double().train()
    getattr(model.block(0), part).branches[1].body.dropout = instead()
    wanted, found = passes(model), passes(fuse_branches(model))
    assert far(found, wanted) < 1e-10
    assert joined == [*(places if instead is Twice else [True, True]), True, True]


def test_activations_with_parameters(joined):
    model = randomize(build(TINY))
    for start, branch in zip((0.1, 0.4), model.block(0).ffn.branches, strict=True):
        branch.body.activation = nn.PReLU(init=start)
    model.double().train()
    wanted, found = passes(model), passes(fuse_branches(model))
    assert far(found, wanted) < 1e-10
    assert joined == [True, False, True, True]


def test_stochastic_depth_switched_off(joined):
    model = randomize(build(TINY.replace(drop_path=0.5))).double().train()
    for branch in model.block(0).mix.branches:
        branch.drop_path.eval()
    wanted, found = passes(model), passes(fuse_branches(model))
    assert far(found, wanted) < 1e-10
    assert joined == [False, True, True, True]


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(
    ("residual", "wanted"), [("plain", torch.bfloat16), ("scalar", torch.bfloat16), ("layerscale", torch.float32)]
)
def test_the_residual_stream_keeps_its_dtype(residual, wanted, drop, joined):
    """The output of a convolution is bfloat16; the first scale of channels promotes the sum to float32."""
    bare = {"stem": "conv", "pos_embed": "none", "pooling": "mean"}
    model = build(TINY.replace(residual=residual, drop_path=drop, **bare)).train()
    for join in (False, True):
        fuse_branches(model, join)
        with torch.autocast("cpu", torch.bfloat16):
            x, layout = model._add_pos_embed(*model.embed(IMAGE.float()))
            assert x.dtype == torch.bfloat16
            assert model.block(0).mix(x, layout).dtype == model.block(0)(x, layout).dtype == wanted
    assert joined == [True, True, True]


def test_a_compiled_block_is_one_graph():
    model = randomize(build(TINY.replace(residual="layerscale", drop_path=0.4))).train()
    fuse_branches(model)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    wanted = passes(model, IMAGE.float())
    for block in model.blocks:
        block.compile(backend=keep, fullgraph=True)
    found = passes(model, IMAGE.float())
    assert far(found, wanted) < 1e-5
    assert len(graphs) == 1  # both blocks are alike
    products = [node for node in graphs[0].graph.nodes if node.target is F.linear or "linear" in str(node.target)]
    assert len(products) == 4
