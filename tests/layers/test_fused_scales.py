"""Norm weights and residual scales folded into linear layers while training: same results, fewer stored activations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.layers.test_fused_branches import Twice
from tests.models.test_every_model import loss, randomize
from tests.small import structures
from vitrail.layers import attention, fused
from vitrail.layers.block import Branch
from vitrail.layers.fused import fold_scales, fuse_branches, optimize_for_training
from vitrail.layers.token_mixers import PatchLinear, TokenLinear
from vitrail.models.config import Architecture
from vitrail.models.registry import build

TINY = Architecture(width=32, depth=2, heads=2, classes=5, patch_size=8, image_size=(32, 48), residual="layerscale")
BARE = {"pooling": "mean", "pos_embed": "none"}
IMAGE = torch.randn(8, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PATCHES = {"mixer": "linear", "norm": "affine", **BARE}
HOOKS = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook", "register_full_backward_hook")


@pytest.fixture
def taken(monkeypatch):
    """For each branch in turn, which scales were folded: "in" that of the norm, "out" that of the residual."""
    words = {"norm_folded": "in", "scale_folded": "out", "folded_patch_linear": "inout"}
    results, original = [], {name: getattr(fused, name) for name in ("folded_branch", *words)}

    inside = []

    def folded_branch(*arguments):
        results.append("")
        inside.append(True)
        try:
            return original["folded_branch"](*arguments)
        finally:
            inside.pop()

    def recorded(name):
        def run(*arguments):
            out = original[name](*arguments)
            if inside:  # fused branches are folded too
                results[-1] += words[name] if out is not None else ""
            return out

        return run

    monkeypatch.setattr(fused, "folded_branch", folded_branch)
    for name in words:
        monkeypatch.setattr(fused, name, recorded(name))
    return results


def expected(model):
    """What the branches of a model fold."""
    a = model.architecture
    enters = "in" if a.norm in ("layer", "affine") and a.norm_place == "pre" and a.residual != "fixup" else ""
    leaves = "out" if a.residual in ("layerscale", "affine", "scalar", "rezero", "skipinit") and not a.dropout else ""
    across = "inout" if enters and leaves and a.norm == "affine" else ""
    bodies = [part.body for part in model.modules() if isinstance(part, Branch)]
    return [
        enters + leaves if type(body) in fused.FIRST_AND_LAST else across if type(body) is PatchLinear else "" for body in bodies
    ]


def passes(model, image=IMAGE, rounding=False):
    """Logits and all gradients of one step, with the same seed every time."""
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounding):
        outputs = model.outputs(image)
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss(outputs), list(learned.values()))
    return {"logits": outputs.logits.detach()} | dict(zip(learned, gradients, strict=True))


def far(found, wanted):
    """The largest difference of any tensor, as a share of its norm; what should be zero is measured by the whole gradient."""
    whole = sum(value.square().sum() for name, value in wanted.items() if name != "logits").sqrt()
    return max(
        ((found[name] - value).norm() / torch.maximum(value.norm(), 1e-4 * whole)).item() for name, value in wanted.items()
    )


PAPERS = {name: architecture for name, architecture in structures().items() if architecture.depth}  # convnets have no branches


@pytest.mark.parametrize("changes", [{}, {"drop_path": 0.4}, {"drop_path": 0.4, "drop_path_kind": "skip"}], ids=str)
@pytest.mark.parametrize("name", PAPERS)
def test_same_outputs_and_gradients_for_every_paper(name, changes, taken):
    a = PAPERS[name].replace(**changes)
    model = randomize(build(a)).double().train()
    image = torch.randn(5, a.channels, *a.image_size, dtype=torch.float64)
    names, wanted = list(model.state_dict()), passes(model, image)
    found = passes(fold_scales(model), image)
    assert list(model.state_dict()) == names
    assert far(found, wanted) < 1e-10
    assert taken == expected(model)
    taken.clear()
    again = passes(fold_scales(model, False), image)
    assert all(torch.equal(value, wanted[name]) for name, value in again.items())
    assert not taken


@pytest.mark.parametrize(
    "changes",
    [
        {"residual": "affine", "qkv_bias": False},
        {"residual": "scalar", "activation": "silu"},
        {"residual": "rezero", "drop_path": 0.3, "drop_path_schedule": "linear"},
        {"pos_embed": "relative_bias", "pos_embed_place": "shared"},
        {"mixer": "talking_heads", "attention_dropout": 0.2},
        {"mixer": "talking_heads", "pos_embed": "relative_bias", "pos_embed_place": "shared"},
        {"mixer": "patchconv", "mlp_ratio": 0.0, "residual": "affine", **BARE},
        {"norm": "batch", "activation": "relu"},
        {"norm_place": "post"},
        {"branches": 2, "drop_path": 0.3},
        {"branches": 2, "drop_path": 0.3, "drop_path_kind": "skip"},
        {**PATCHES, "drop_path": 0.3, "drop_path_kind": "skip"},
        {**PATCHES, "residual": "affine"},
        {**PATCHES, "residual": "scalar", "activation": "silu"},
        {**PATCHES, "branches": 2},
        {"norm": "affine"},
    ],
    ids=str,
)
def test_same_outputs_and_gradients(changes, taken):
    model = randomize(build(TINY.replace(**changes))).double().train()
    wanted = passes(model)
    assert far(passes(fold_scales(model)), wanted) < 1e-10
    assert taken == expected(model)
    model.recompute = model.architecture.norm != "batch"
    assert far(passes(model), wanted) < 1e-10


def test_a_scale_of_zero_is_trained(taken):
    model = build(TINY.replace(residual="rezero")).double().train()
    nn.init.normal_(model.head.weight)
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == 4 * ["inout"]
    assert all(found[name].abs().max() > 0 for name in found if name.endswith("scale.weight"))


def test_fused_branches_stay_fused(monkeypatch, taken):
    joined, original = [], fused.fused_branches
    monkeypatch.setattr(fused, "fused_branches", lambda *arguments: joined.append(1) or original(*arguments))
    model = randomize(build(TINY.replace(branches=2, drop_path=0.3))).double().train()
    wanted = passes(model)
    assert far(passes(fuse_branches(fold_scales(model))), wanted) < 1e-10
    assert (len(joined), taken) == (4, [])
    model.block(0).mix.branches[1].body.qkv.register_forward_hook(lambda *_: None)  # no longer fused, still folded
    assert far(passes(model), wanted) < 1e-10
    assert taken == ["inout", "out"]


@pytest.mark.parametrize(
    ("changes", "folded"),
    [
        ({"residual": "plain", "norm": "batch"}, ["", ""]),
        ({"residual": "constant", "layerscale_init": 0.5}, ["in", "in"]),
        ({"residual": "fixup"}, ["", ""]),
        ({"layerscale_frozen": True}, ["in", "in"]),
        ({"dropout": 0.1}, ["in", "in"]),
        ({"mixer": "linear", **BARE}, ["", "inout"]),
        ({**PATCHES, "norm_place": "post"}, ["", "out"]),
        ({**PATCHES, "layerscale_frozen": True}, ["", "in"]),
        ({**PATCHES, "residual": "plain"}, ["", "in"]),
        ({"mixer": "mlp", **BARE}, ["", "inout"]),
        ({"mixer": "axial", **BARE}, ["", "inout"]),
        ({"mixer": "separable", **BARE}, ["", "inout"]),
    ],
    ids=str,
)
def test_unsupported_branches_are_not_folded(changes, folded, taken):
    model = randomize(build(TINY.replace(**changes))).double().train()
    wanted, found = passes(model), passes(fold_scales(model))
    assert taken == 2 * folded
    assert far(found, wanted) < 1e-10
    assert any(folded) or all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("frozen", "folded"),
    [
        ("body.proj.weight", "in"),
        ("body.proj.bias", "inout"),
        ("scale.weight", "in"),
        ("norm.weight", "out"),
        ("norm.bias", "inout"),
        ("body.qkv.weight", "out"),
    ],
)
def test_frozen_parameters(frozen, folded, taken):
    """A frozen layer would have to store its input; a frozen bias has no effect."""
    model = randomize(build(TINY)).double().train()
    model.block(0).mix.branches[0].get_parameter(frozen).requires_grad_(False)
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == [folded, "inout", "inout", "inout"]


def test_a_norm_without_a_bias(taken):
    model = randomize(build(TINY)).double().train()
    model.block(0).mix.branches[0].norm.bias = None
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == ["out", "inout", "inout", "inout"]


@pytest.mark.parametrize(
    ("frozen", "folded"),
    [
        ("mix.branches.0.norm.weight", ["", "inout"]),
        ("mix.branches.0.norm.bias", ["inout", "inout"]),
        ("mix.branches.0.body.map.weight", ["inout", "inout"]),
        ("mix.branches.0.scale.weight", ["", "inout"]),
        ("ffn.branches.0.norm.weight", ["inout", "out"]),
        ("ffn.branches.0.body.fc1.weight", ["inout", "out"]),
        ("ffn.branches.0.body.fc2.weight", ["inout", "in"]),
    ],
)
def test_frozen_parameters_of_cross_patch_layers(frozen, folded, taken):
    model = randomize(build(TINY.replace(**PATCHES))).double().train()
    model.block(0).get_parameter(frozen).requires_grad_(False)
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == [*folded, "inout", "inout"]


def test_a_layer_without_a_bias(taken):
    model = randomize(build(TINY)).double().train()
    model.block(0).ffn.branches[0].body.fc2.bias = None
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == ["inout", "in", "inout", "inout"]


class Added(TokenLinear):
    """A layer with another forward pass."""

    def forward(self, x):
        return super().forward(x) + 0.5 * x


@pytest.mark.parametrize(("part", "folded"), [("mix", ["in", "inout"]), ("ffn", ["inout", "in"])])
@pytest.mark.parametrize("instead", [nn.Identity, Twice], ids=["nothing", "something"])
def test_another_module_in_place_of_dropout(part, folded, instead, taken):
    model = randomize(build(TINY)).double().train()
    getattr(model.block(0), part).branches[0].body.dropout = instead()
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == [*(folded if instead is Twice else 2 * ["inout"]), "inout", "inout"]


@pytest.mark.parametrize("kind", [Added, TokenLinear, nn.Linear])
def test_another_module_in_place_of_token_linear(kind, taken):
    model = randomize(build(TINY.replace(**PATCHES))).double().train()
    body = model.block(0).mix.branches[0].body
    size = body.map.in_features if kind is not nn.Linear else model.architecture.width
    body.map = kind(size, size).double()
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == ["inout" if kind is TokenLinear else "", "inout", "inout", "inout"]


def test_a_subclass_of_patch_linear(taken):
    class Own(PatchLinear):
        def forward(self, x, layout, relative=None):
            return super().forward(x, layout) + x

    model = randomize(build(TINY.replace(**PATCHES))).double().train()
    branch = model.block(0).mix.branches[0]
    own = Own(branch.body.grid).double()
    own.map, branch.body = branch.body.map, own
    wanted, found = passes(model), passes(fold_scales(model))
    assert far(found, wanted) < 1e-10
    assert taken == ["", "inout", "inout", "inout"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("part", "folded"),
    [
        ("", "inout"),
        ("norm", "out"),
        ("body", ""),
        ("body.qkv", "out"),
        ("body.proj", "in"),
        ("body.dropout", "in"),
        ("scale", "in"),
        ("drop_path", "inout"),
    ],
)
def test_hooks_are_called(part, folded, hook, taken):
    model = fold_scales(randomize(build(TINY.replace(drop_path=0.2)))).double().train()
    seen = []
    getattr(model.block(0).mix.branches[0].get_submodule(part), hook)(lambda *_: seen.append(1))
    passes(model)
    assert seen == [1]
    assert taken == [folded, "inout", "inout", "inout"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("part", "folded"),
    [
        ("mix.branches.0", ["inout", "inout"]),
        ("mix.branches.0.norm", ["", "inout"]),
        ("mix.branches.0.body", ["", "inout"]),
        ("mix.branches.0.body.map", ["", "inout"]),
        ("mix.branches.0.scale", ["", "inout"]),
        ("ffn.branches.0.norm", ["inout", "out"]),
        ("ffn.branches.0.body.fc1", ["inout", "out"]),
        ("ffn.branches.0.body.activation", ["inout", "inout"]),
        ("ffn.branches.0.body.fc2", ["inout", "in"]),
    ],
)
def test_hooks_of_cross_patch_layers_are_called(part, folded, hook, taken):
    model = randomize(build(TINY.replace(**PATCHES))).double().train()
    wanted, seen = passes(model), []
    getattr(fold_scales(model).block(0).get_submodule(part), hook)(lambda *_: seen.append(1))
    assert far(passes(model), wanted) < 1e-10
    assert seen == [1]
    assert taken == [*folded, "inout", "inout"]


@pytest.mark.parametrize(
    "part",
    ["mix.branches.0.body.before", "mix.branches.0.body.after", "ffn.branches.0.body.fc1", "ffn.branches.0.body.activation"],
)
def test_hooks_disable_kernels(part, monkeypatch):
    """With replacements for the kernels, which need a GPU: they take weights and skip the calls of modules."""
    requested = []

    def heads(qkv, *mixing):
        requested.append("heads")
        return qkv[:, :, 2]

    def gelu(x, bias):
        requested.append("gelu")
        return F.gelu(x + bias)

    monkeypatch.setattr(attention, "select_talking_heads", lambda qkv: heads)
    monkeypatch.setattr(fused, "select_bias_gelu", lambda x: gelu)
    model = optimize_for_training(randomize(build(TINY.replace(mixer="talking_heads")))).double().train()
    seen = []
    model.block(0).get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
    model(IMAGE)
    assert seen == [1]
    assert requested == (["gelu", "heads", "gelu"] if part.startswith("mix") else ["heads", "heads", "gelu"])


def test_scales_are_not_folded_where_they_must_not(taken):
    """In evaluation, in float16 and for export."""
    model, image = fold_scales(randomize(build(TINY))).train(), IMAGE.float()
    model.eval()(image)
    assert taken == []
    model.train()
    with torch.autocast("cpu", torch.float16):
        model(image)
    assert taken == 4 * [""]
    taken.clear()
    torch.export.export(model, (image,))
    assert not any(taken)


@pytest.mark.parametrize(
    "changes", [{}, {"residual": "affine"}, {"mixer": "talking_heads"}, {"mixer": "patchconv", **BARE}, PATCHES], ids=str
)
def test_bfloat16_is_as_accurate(changes):
    """Both ways against float64, each kind of parameter separately, over a few seeds."""
    errors: dict[str, list[float]] = {}
    a = TINY.replace(width=96, heads=3, depth=4, drop_path=0.2, stem="conv", **changes)
    for seed in range(3):
        torch.manual_seed(seed)
        model = randomize(build(a)).train()
        wanted = passes(copy.deepcopy(model).double())
        for way, fold in enumerate((False, True)):
            found = passes(fold_scales(model, fold), IMAGE.float(), rounding=True)
            for name, value in wanted.items():
                if name.endswith("before.bias"):  # which a softmax does not see
                    continue
                kind = name.split(".", 5)[-1] if ".branches." in name else name
                errors.setdefault(kind, [0.0, 0.0])[way] += ((found[name] - value).norm() / value.norm().clamp_min(1e-8)).item()
    plain, folded = (sum(way) for way in zip(*errors.values(), strict=True))
    assert folded < 1.1 * plain
    assert errors["logits"][1] < 1.5 * errors["logits"][0]
    assert all(ours < 2 * theirs for theirs, ours in errors.values())


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"mixer": "patchconv"}, torch.float32),
        ({"residual": "affine"}, torch.float32),
        ({"residual": "scalar"}, torch.bfloat16),
        ({"residual": "scalar", **PATCHES}, torch.bfloat16),
        ({"residual": "scalar", "drop_path": 0.3}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_residual_stream_keeps_its_dtype(changes, wanted):
    """The output of a convolution is bfloat16; scales of channels promote the sum to float32, scalars do not."""
    model = build(TINY.replace(**{"stem": "conv", **BARE, **changes})).train()
    for fold in (False, True):
        fold_scales(model, fold)
        with torch.autocast("cpu", torch.bfloat16):
            x, layout = model._add_pos_embed(*model.embed(IMAGE.float()))
            assert x.dtype == torch.bfloat16
            assert model.block(0).mix(x, layout).dtype == model.block(0)(x, layout).dtype == wanted


def kept(model, rounding):
    """Bytes that a block stores for its backward pass, without parameters; and the number of elements of its tokens."""
    x, layout = model._add_pos_embed(*model.embed(IMAGE.float()))
    own, found = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that nothing else comes to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, rounding):
        model.block(0)(x, layout).sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values()), x.numel()


@pytest.mark.parametrize(("backend", "tensors"), [("", 2), ("aot_eager_decomp_partition", 1)])
@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0),
        ({"residual": "affine", "drop_path": 0.3}, 1.0),
        ({"mixer": "talking_heads", "drop_path": 0.25, "drop_path_kind": "skip"}, 0.75),
        ({"mixer": "patchconv", **BARE}, 1.0),
    ],
    ids=str,
)
def test_fewer_activations_are_stored(changes, share, backend, tensors):
    """Two tensors [B, T, D] per block are saved; in float32 the folded weights are stored instead.

    torch.compile decides by the rules of this backend: it recomputes the sum between mixer and MLP, and stores the output of
    the first branch for that, folded or not.
    """
    found = []
    model = randomize(build(TINY.replace(**changes))).train()
    first = 32 * 32 if changes.get("mixer") == "patchconv" else 3 * 32 * 32
    weights = 4 * (first + 32 * 32 + 2 * 32 * 128)
    for fold in (False, True):
        fold_scales(model, fold)
        torch._dynamo.reset()
        if backend:
            model.block(0).compile(backend=backend, fullgraph=True)
        found.append([kept(model, rounding) for rounding in (True, False)])
    (half, _), (single, _) = found[0]
    (folded_half, tokens), (folded_single, _) = found[1]
    assert half - folded_half == tensors * 2 * tokens * share
    rows = 1000  # which images are in may be kept one way or the other
    least = tensors * 4 * tokens * share - weights
    if tensors == 1:  # a compiler may also fold a second time
        assert single - folded_single > least - rows
    else:
        assert single - folded_single == pytest.approx(least, abs=rows)


@pytest.mark.parametrize("changes", [{}, {"mixer": "talking_heads"}, {"mixer": "patchconv", **BARE}, PATCHES], ids=str)
def test_a_compiled_block_is_one_graph(changes):
    model = randomize(build(TINY.replace(depth=3, drop_path=0.4, drop_path_schedule="linear", **changes))).train()
    wanted = passes(fold_scales(model), IMAGE.float())
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=keep, fullgraph=True)
    assert far(passes(model, IMAGE.float()), wanted) < 1e-5
    assert len(graphs) == 2  # the first block never drops, the others are alike
    passes(model, IMAGE.float())
    assert len(graphs) == 2
    assert not any("scale" in str(node.target) and node.op == "call_module" for node in graphs[0].graph.nodes)
    assert any(node.target is F.linear or "linear" in str(node.target) for node in graphs[0].graph.nodes)
