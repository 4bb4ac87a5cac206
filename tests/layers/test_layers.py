"""Properties of single layers that the papers state."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from tests.models.test_every_model import randomize
from vitrail.layers.bit_resnet import pad_same
from vitrail.layers.block import Branch
from vitrail.layers.drop_path import DropPath, drop_path_rates
from vitrail.layers.fused import SubsetDropPath, SubsetResidual, choose_subset, gather_rows, scatter_rows
from vitrail.layers.layout import Layout
from vitrail.layers.patch_embed import BasicStem, PatchProjection, basic_strides, hmlp_strides, unfold_patches
from vitrail.layers.token_mixers import TokenLinear
from vitrail.models.cait import layerscale_init_at_depth
from vitrail.models.config import FUSIONS, Architecture
from vitrail.models.registry import build

TINY = Architecture(width=32, depth=2, heads=2, classes=5, image_size=(32, 48))


def perturbed(stem, image):
    """Which tokens change when all pixels of the second patch of the first row change."""
    other = image.clone()
    other[:, :, :16, 16:32] += torch.randn(1, 3, 16, 16)
    return (stem(other) - stem(image)).abs().amax((0, 2)) > 1e-5


@pytest.mark.parametrize("stem", ["linear", "hmlp", "local_transformer"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_no_pixel_reaches_another_patch(stem, norm):
    model = randomize(build(TINY.replace(stem=stem, stem_norm=norm))).eval()
    assert perturbed(model.stem, torch.randn(1, 3, 32, 48)).tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("stem", ["conv", "tower", "basic"])
def test_convolutional_stems_mix_patches(stem):
    model = randomize(build(TINY.replace(stem=stem, stem_width=8, stem_layers=(1, 1)))).eval()
    assert perturbed(model.stem, torch.randn(1, 3, 32, 48)).sum() > 1


@pytest.mark.parametrize("size", [(32, 48), (35, 63)])
def test_patches_as_a_product_are_the_convolution(size):
    """Values and gradients; pixels behind the last whole patch are left out by both."""
    map = PatchProjection(3, 24, 16).double()
    image = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(image, map.weight, map.bias, stride=16)
    found = map(image)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (image, map.weight, map.bias), direction)
    torch.testing.assert_close(torch.autograd.grad(found, (image, map.weight, map.bias), direction), wanted)
    torch.testing.assert_close(unfold_patches(image, 16), F.unfold(image, 16, stride=16).transpose(1, 2))


def test_token_linear_is_linear_on_the_transpose():
    map = TokenLinear(6, 10).double()
    x = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    expected = F.linear(x.transpose(1, 2), map.weight, map.bias).transpose(1, 2)
    found, direction = map(x), torch.randn(3, 10, 5, dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (x, map.weight, map.bias), direction)
    torch.testing.assert_close(torch.autograd.grad(found, (x, map.weight, map.bias), direction), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert map.float()(x.float()).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_token_linear_on_a_gpu(compiled):
    """Rows are padded with zeros, without effect on the result."""
    map, x, gradient = TokenLinear(9, 13).cuda(), torch.randn(2, 9, 24, device="cuda"), torch.randn(2, 13, 24, device="cuda")
    body = torch.compile(map) if compiled else map
    with torch.autocast("cuda", torch.bfloat16):
        out = body(x.requires_grad_())
    out.backward(gradient.to(out.dtype))
    found = [out.double(), x.grad.double(), map.weight.grad.double(), map.bias.grad.double()]
    exact = [each.detach().double().requires_grad_() for each in (x, map.weight, map.bias)]
    wanted = torch.einsum("oi,bid->bod", exact[1], exact[0]) + exact[2][:, None]
    wanted = [wanted, *torch.autograd.grad(wanted, exact, gradient.double())]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


def test_rows_of_a_subset_gathered_and_scattered():
    subset = choose_subset(torch.rand(1, 7), 4)
    assert subset.rows.tolist() == sorted(set(subset.rows.tolist()))
    assert [subset.position[row].item() for row in subset.rows] == [0, 1, 2, 3]
    assert (subset.position == -1).sum() == 3
    x = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather_rows(x, subset), x[subset.rows])
    back = scatter_rows(gather_rows(x, subset), subset)
    assert torch.equal(back[subset.rows], x[subset.rows])
    assert back[subset.position < 0].eq(0).all()
    part = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, subset), x)
    assert torch.autograd.gradcheck(lambda part: scatter_rows(part, subset), part)


@pytest.mark.parametrize(
    ("patch", "stages", "strides"),
    [
        (1, 2, (1, 1, 1)),
        (2, 2, (1, 2, 1)),
        (4, 2, (1, 2, 2)),
        (4, 3, (1, 2, 2, 1)),
        (8, 2, (2, 2, 2)),
        (16, 2, (4, 2, 2)),
        (16, 3, (2, 2, 2, 2)),
    ],
)
def test_the_basic_stem_halves_as_a_resnet_does(patch, stages, strides):
    assert basic_strides(patch, stages) == strides
    for chosen in (strides, strides[::-1]):
        stem = BasicStem(3, 24, 4, (1,) * stages, chosen, "batch", "relu")
        tokens = stem(torch.randn(2, 3, 4 * patch, 5 * patch))
        assert tokens.shape == (2, 20, 24)
        assert tokens.is_contiguous()
        assert stem.grid(4 * patch, 5 * patch) == (4, 5)


def test_hmlp_hierarchies():
    assert hmlp_strides(16) == (4, 2, 2)
    assert all(torch.tensor(hmlp_strides(patch)).prod() == patch for patch in (4, 8, 14, 16, 28, 32))


@pytest.mark.parametrize("side", [7, 8, 9, 224])
@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (3, 1), (1, 1), (1, 2)])
def test_same_padding_gives_the_ceiling(side, kernel, stride):
    padded = pad_same(torch.randn(1, 1, side, side), kernel, stride)
    assert (padded.shape[-1] - kernel) // stride + 1 == -(-side // stride)


def test_drop_path_is_per_image_and_unbiased():
    drop = DropPath(0.25).train()
    x = torch.ones(20000, 2, 3)
    y = drop(x)
    rows = y.flatten(1)
    assert ((rows == 0).all(1) | torch.isclose(rows, torch.tensor(4 / 3)).all(1)).all()
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert drop.eval()(x) is x
    assert drop_path_rates(0.3, 4, "uniform") == [0.3] * 4
    assert drop_path_rates(0.3, 4, "linear") == pytest.approx([0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_drop_path_takes_four_operators(dtype):
    """Draw, compare, choose and multiply; to the bit what dividing and rounding would give, also after moves and casts."""
    drop, x = copy.deepcopy(DropPath(0.3).to("meta").half().to_empty(device="cpu")).train(), torch.randn(64, 5, 3).to(dtype)
    torch.manual_seed(0)
    with Seen() as seen:
        found = drop(x)
    torch.manual_seed(0)
    wanted = x * ((torch.rand(64, 1, 1) < drop.keep_prob) / drop.keep_prob).to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    assert seen.names == ["rand", "lt", "mul", "mul"]
    assert torch.equal(drop.scales[torch.float32], 1.0 / drop.keep_prob)
    torch.manual_seed(0)
    assert torch.equal(torch.compile(drop, backend="eager", fullgraph=True)(x), wanted)


class Seen(TorchDispatchMode):
    """The names of the operators that reach the device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_skipped_images_are_not_computed_and_the_mean_is_right():
    """Of eight images four have each branch, twice as strong; which ones changes, and nothing else does in evaluation."""
    seen = []

    class Doubled(nn.Module):
        def forward(self, x, layout, relative=None):
            seen.append(x.shape[0])
            return 2 * x

    branches = [Branch(nn.Identity(), Doubled(), nn.Identity(), SubsetDropPath(0.5)) for _ in range(2)]
    residual, x = SubsetResidual(branches), torch.randn(8, 3, 4, requires_grad=True)
    torch.testing.assert_close(residual.eval()(x, Layout(1, 3)), 5 * x)
    residual.train()
    seen.clear()
    outs = torch.stack([residual(x, Layout(1, 3)) for _ in range(400)])
    assert set(seen) == {4}
    ratio = (outs / x).detach()
    torch.testing.assert_close(ratio, ratio[..., :1, :1].expand_as(ratio), rtol=1e-4, atol=1e-4)
    assert {round(each) for each in ratio.flatten().tolist()} == {1, 5, 9}
    torch.testing.assert_close(ratio.mean((0, 1, 2, 3)), torch.tensor(5.0), rtol=1e-4, atol=1e-4)
    assert ratio[:, :, 0, 0].mean(0).sub(5).abs().max() < 0.7  # each image as often as the others
    (gradient,) = torch.autograd.grad(outs[0].sum(), x)
    torch.testing.assert_close(gradient, ratio[0], rtol=1e-4, atol=1e-4)


def test_parallel_branches_draw_their_own_masks():
    model = randomize(build(TINY.replace(branches=2, drop_path=0.5))).train()
    torch.manual_seed(1)
    masks = [branch.drop_path(torch.ones(64, 1, 1)) for branch in model.block(0).mix.branches]
    assert not torch.equal(*masks)


@pytest.mark.parametrize("depth", [12, 18, 24, 36, 48])
def test_the_layerscale_rule(depth):
    assert layerscale_init_at_depth(depth) == {12: 0.1, 18: 0.1, 24: 1e-5, 36: 1e-6, 48: 1e-6}[depth]


@pytest.mark.parametrize("residual", ["rezero", "skipinit", "fixup"])
def test_branches_initialized_to_zero_are_the_identity(residual):
    model = build(TINY.replace(residual=residual)).eval()
    image = torch.randn(2, 3, 32, 48)
    x, layout = model._prepare_block_input(0, *model._add_pos_embed(*model.embed(image)))
    torch.testing.assert_close(model.block(0)(x, layout), x)


def test_fixup_and_tfixup_initialization():
    fixup, plain, tfixup = (build(TINY.replace(residual=kind, depth=8)) for kind in ("fixup", "plain", "tfixup"))
    first = lambda model: model.block(0).ffn.branches[0].body.fc1.weight.std().item()  # noqa: E731
    assert first(fixup) == pytest.approx(first(plain) * 16**-0.5, rel=0.1)
    assert tfixup.block(0).ffn.branches[0].scale.weight.item() == 1
    limit = 0.67 * 8**-0.25 * (6 / (32 + 128)) ** 0.5
    assert tfixup.block(0).ffn.branches[0].body.fc1.weight.abs().max().item() == pytest.approx(limit, rel=0.05)


def test_patches_are_permutation_blind_without_positions():
    """Without positions the class vector does not know the order of the patches; with them it does."""
    image = torch.randn(1, 3, 32, 48)
    swapped = torch.cat([image[..., 16:32], image[..., :16], image[..., 32:]], -1)
    for positions in ("none", "learned"):
        model = randomize(build(TINY.replace(pos_embed=positions))).eval()
        assert torch.allclose(model(image), model(swapped), atol=1e-4) == (positions == "none")


def test_the_class_attention_stage_leaves_the_patches_alone():
    model = randomize(build(TINY.replace(mixer="talking_heads", pooling="class_attention"))).eval()
    image = torch.randn(1, 3, 32, 48)
    before = model.features(image)
    model.pooling.queries.data += torch.randn(1, 32)
    after = model.features(image)
    assert torch.equal(before.tokens, after.tokens)
    assert not torch.allclose(before.pooled, after.pooled)


def test_per_class_queries_that_are_copies_equal_the_single_query():
    pooling = {"pooling": "class_attention", "pooling_keys": "patches"}
    single = randomize(build(TINY.replace(mixer="patchconv", mlp_ratio=0, **pooling))).eval()
    many = build(single.architecture.replace(pooling="per_class")).eval()
    state = single.state_dict()
    state["pooling.queries"] = state["pooling.queries"].expand(5, -1)
    many.load_state_dict(state)
    image = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(many(image), single(image), rtol=1e-4, atol=1e-4)


def test_fusion_of_two_heads():
    image = torch.randn(4, 3, 32, 48)
    models = {kind: randomize(build(TINY.replace(distillation=True, fusion=kind))).eval() for kind in FUSIONS}
    for model in models.values():
        model.load_state_dict(models["class"].state_dict())
    both = models["class"].outputs(image)
    main, second = both.main, both.distillation
    torch.testing.assert_close(models["logit_mean"](image), (main + second) / 2)
    torch.testing.assert_close(models["softmax_sum"](image).softmax(-1), (main.softmax(-1) + second.softmax(-1)) / 2)
    assert torch.equal(models["class"](image), main)
    assert torch.equal(models["distillation"](image), second)


def test_the_dense_head_counts_in_evaluation_only():
    model = randomize(build(TINY.replace(dense_head=True)))
    image = torch.randn(2, 3, 32, 48)
    train, evaluation = model.train().outputs(image), model.eval().outputs(image)
    assert torch.equal(train.logits, train.main)
    torch.testing.assert_close(evaluation.logits, evaluation.main + 0.5 * evaluation.dense.max(1).values)


def test_group_norm_of_one_group_is_layer_norm():
    one, other = (randomize(build(TINY.replace(norm=kind, norm_eps=1e-5))).eval() for kind in ("group", "layer"))
    other.load_state_dict(one.state_dict())
    image = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(one(image), other(image), rtol=1e-4, atol=1e-4)


def test_batch_norm_with_queries_keeps_its_statistics_to_the_trunk():
    """Training and evaluation agree once the running statistics have settled."""
    model = vitrail.create("patchconvnet_s60_batchnorm", classes=5, image_size=64, depth=2, width=32, layerscale_init=0.5).train()
    image = torch.randn(32, 3, 64, 64)
    with torch.no_grad():
        for _ in range(60):
            model(image)
        train, evaluation = model(image), model.eval()(image)
        assert (train - evaluation).abs().max() < 0.2 * train.abs().max()
        assert model(image[:1]).shape == (1, 5)


def test_zero_started_head_gives_zero_logits():
    model = vitrail.create("vit_tiny_patch16", depth=1)
    logits = model(torch.randn(2, 3, 224, 224))
    assert torch.equal(logits, torch.zeros(2, 1000))
    assert F.cross_entropy(logits, torch.tensor([3, 4])).item() == pytest.approx(6.9078, abs=1e-3)


def test_relative_positions_equal_their_definition():
    model = randomize(build(TINY.replace(pos_embed="relative", pos_embed_place="layers")))
    x, layout = model._prepare_block_input(0, *model._add_pos_embed(*model.embed(torch.randn(1, 3, 32, 48))))
    body, relative = model.block(0).mix.branches[0].body, model.pos_embed[0]
    query, _, _ = body.split_heads(body.qkv(x))
    found = relative(query, layout)
    table, patches = relative.table, layout.patches
    for q in range(1 + patches):
        for k in range(1 + patches):
            row = patches - 1 + (q - 1) - (k - 1) if q and k else -3 if k else -2 if q else -1
            expected = (query[:, :, q] @ table[row]) / 4
            torch.testing.assert_close(found[:, :, q, k], expected, rtol=1e-4, atol=1e-4)


def test_random_numbers_of_several_views():
    """A batch of two views of each image uses the same numbers however the images are divided."""
    noise = torch.rand(4)

    def masks(rows):
        drop = DropPath(0.5)
        drop.noise = noise[rows]
        return drop.sample_mask(torch.zeros(2 * len(rows), 3)).view(2, len(rows))

    together = masks([0, 1, 2, 3])
    assert torch.equal(together, torch.cat([masks([0, 1]), masks([2, 3])], 1))
    assert torch.equal(together[0], noise < 0.5)
    drop = DropPath(0.5)
    drop.noise = noise
    with pytest.raises(RuntimeError, match="random numbers for 4 images, not for 6"):
        drop.sample_mask(torch.zeros(6, 3))
