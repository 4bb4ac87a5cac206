"""The interface of teachers, for all kinds of networks."""

import pytest
import torch
from torch import nn

import vitrail
from tests.small import structures
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build
from vitrail.models.regnet import regnet
from vitrail.teachers import Teacher, open_teacher
from vitrail.teachers.network import ConvNetwork, TimmNetwork

HALF = Preprocessing((8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
STUDENT = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Little(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 4)
        self.dropout = nn.Dropout(0.5)

    def forward_features(self, images):
        return self.dropout(self.conv(images).relu())

    def get_classifier(self):
        return self.fc


def normalized(pixels, mean, std):
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def test_images_are_renormalized():
    teacher = Teacher(ConvNetwork(Little()), HALF, 4)
    pixels = torch.rand(2, 3, 8, 8)
    seen = teacher.adapt(normalized(pixels, *STUDENT), *STUDENT)
    torch.testing.assert_close(seen, normalized(pixels, HALF.mean, HALF.std))
    torch.testing.assert_close(teacher(normalized(pixels, *STUDENT), *STUDENT), teacher(normalized(pixels, HALF.mean, HALF.std)))
    own = torch.randn(2, 3, 8, 8)
    assert teacher.adapt(own) is own


def test_bgr():
    teacher = Teacher(ConvNetwork(Little()), HALF, 4, channel_order="bgr")
    pixels = torch.rand(1, 3, 4, 4)
    torch.testing.assert_close(teacher.adapt(pixels), pixels[:, [2, 1, 0]])
    torch.testing.assert_close(
        teacher.adapt(normalized(pixels, *STUDENT), *STUDENT), normalized(pixels, HALF.mean, HALF.std)[:, [2, 1, 0]]
    )


def test_images_keep_their_size_unless_size_is_set():
    teacher = Teacher(ConvNetwork(Little()), HALF, 4)
    images = torch.randn(2, 3, 20, 12)
    assert teacher.adapt(images).shape == (2, 3, 20, 12)
    teacher = Teacher(ConvNetwork(Little()), HALF, 4, size=8)
    assert teacher.adapt(images).shape == (2, 3, 8, 8)
    flat = torch.full((1, 3, 30, 30), 0.25)
    torch.testing.assert_close(teacher.adapt(flat), flat[:, :, :8, :8])  # a resized plain image is as plain


def test_it_is_frozen_and_stays_in_evaluation_mode():
    teacher = Teacher(ConvNetwork(Little()), HALF, 4)
    around = nn.ModuleList([teacher]).train()
    assert around.training
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(teacher(images), teacher(images))


@pytest.mark.parametrize("ask", ["forward", "dense", "features"])
def test_outputs_can_be_targets_of_losses(ask):
    teacher = Teacher(ConvNetwork(Little()), HALF, 4)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    target = getattr(teacher, ask)(images)
    assert not target.requires_grad
    student = torch.randn_like(target, requires_grad=True)
    nn.functional.cross_entropy(student, target.softmax(1)).backward()
    assert student.grad is not None
    assert images.grad is None


def test_autocast_around_it_has_no_effect():
    teacher = Teacher(ConvNetwork(Little()), HALF, 4)
    images = torch.randn(2, 3, 8, 8)
    plain = teacher(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(teacher(images), plain)
    assert plain.dtype == torch.float32


def test_the_mean_of_dense_logits_is_the_logits_of_a_convnet():
    teacher = open_teacher(build(regnet((1, 1), (8, 16), 8, root=8).replace(classes=5)))
    images = torch.randn(2, 3, 40, 64)
    dense = teacher.dense(images)
    assert dense.shape == (2, 5, 5, 8)
    torch.testing.assert_close(dense.mean((2, 3)), teacher(images), rtol=1e-4, atol=1e-5)
    assert teacher.features(images).shape == (2, 16)


@pytest.mark.parametrize(
    ("images", "colors", "says"),
    [
        (torch.zeros(3, 8, 8), (), r"\[B, 3, height, width\]"),
        (torch.zeros(2, 1, 8, 8), (), r"not \[2, 1, 8, 8\]"),
        (torch.zeros(2, 3, 8, 8), ((0.5,), (0.5,)), "3 values each, not 1 and 1"),
    ],
)
def test_invalid_images(images, colors, says):
    with pytest.raises(vitrail.UserError, match=says):
        Teacher(ConvNetwork(Little()), HALF, 4)(images, *colors)


@pytest.mark.parametrize("name", structures())
def test_every_vitrail_model_can_be_a_teacher(name):
    architecture = structures()[name]
    model = build(architecture, name=name).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    teacher = open_teacher(model)
    images = torch.randn(2, 3, *architecture.image_size)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), model(images))
    if architecture.pooling == "per_class":
        for ask in (teacher.dense, teacher.features):
            with pytest.raises(vitrail.UserError, match="one query per class"):
                ask(images)
        return
    dense = teacher.dense(images)
    assert dense.shape == (2, architecture.classes, *model.grid)
    assert teacher.features(images).shape[0] == 2
    plain = architecture.pooling == "mean" and not (architecture.pool_norm or architecture.pre_logits or architecture.dense_head)
    if plain:
        torch.testing.assert_close(dense.mean((2, 3)), teacher(images), rtol=1e-3, atol=1e-4)
    if architecture.dense_head:
        with torch.no_grad():
            expected = model.outputs(images).dense
        torch.testing.assert_close(dense.flatten(2).transpose(1, 2), expected)
    if teacher.size is None:
        larger = torch.randn(1, 3, *(2 * side for side in architecture.image_size))
        assert teacher.dense(larger).shape[2:] == tuple(2 * side for side in model.grid)
    else:
        larger = torch.randn(1, 3, *(2 * side for side in architecture.image_size))
        assert teacher.dense(larger).shape[2:] == model.grid  # brought to the size it is tied to


def test_dense_logits_of_a_distilled_model_use_both_heads():
    model = build(structures()["deit_tiny_distilled_patch16"]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    images = torch.randn(1, 3, *model.architecture.image_size)
    tokens = model.features(images).tokens
    expected = (model.head(tokens) + model.head_distillation(tokens)) / 2
    torch.testing.assert_close(open_teacher(model).dense(images).flatten(2), expected.transpose(1, 2).detach())


def together_and_apart(teacher, images, what):
    """The outputs of one call, and of one call each."""
    requested = {"logits": teacher, "tokens": teacher.dense, "features": teacher.features}
    return teacher.predict(images, what), {name: requested[name](images) for name in what}


@pytest.mark.parametrize("name", ["deit_tiny_patch16", "deit_tiny_distilled_patch16", "lvvit_t", "cait_xxs24", "resmlp_s12"])
def test_several_outputs_in_one_forward_pass(name):
    model = build(structures()[name]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    runs = []
    model.stem.register_forward_hook(lambda *_: runs.append(1))
    images = torch.randn(2, 3, *model.architecture.image_size)
    together, apart = together_and_apart(open_teacher(model), images, ("logits", "tokens", "features"))
    assert len(runs) == 1 + 3
    assert all(torch.equal(together[key], apart[key]) for key in apart)


class Patches(nn.Module):
    def dynamic_feat_size(self, size):
        return size[0] // 4, size[1] // 4


class TimmLike(nn.Module):
    """the interface of timm: convnets with a norm before the classifier, channels last, tokens of which two are prefix."""

    num_prefix_tokens = 2

    def __init__(self, form):
        super().__init__()
        self.form, self.patch_embed = form, Patches()
        if form == "last":
            self.output_fmt = "NHWC"
        self.proj, self.norm, self.fc = nn.Conv2d(3, 6, 4, 4), nn.LayerNorm(6), nn.Linear(6, 4)
        self.prefix = nn.Parameter(torch.randn(1, 2, 6))

    def forward_features(self, x):
        maps = self.proj(x)
        if self.form == "tokens":
            return torch.cat([self.prefix.expand(len(x), -1, -1), maps.flatten(2).transpose(1, 2)], 1)
        return maps.movedim(1, -1) if self.form == "last" else maps

    def forward_head(self, x, pre_logits=False):
        x = x[:, 2:].mean(1) if self.form == "tokens" else x.mean((1, 2) if self.form == "last" else (2, 3))
        return self.norm(x) if pre_logits else self.fc(self.norm(x))

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


@pytest.mark.parametrize("form", ["first", "last", "tokens"])
def test_modules_with_the_interface_of_timm(form):
    module = TimmLike(form)
    teacher = open_teacher(module, preprocessing=HALF, classes=list("abcd"))
    assert isinstance(teacher.network, TimmNetwork)
    images = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(teacher(images), module(images).detach())
    assert teacher.features(images).shape == (2, 6)
    maps = module.proj(images).movedim(1, -1)
    expected = module.fc(module.norm(maps)).movedim(-1, 1).detach()
    torch.testing.assert_close(teacher.dense(images), expected)
    together, apart = together_and_apart(teacher, images, ("logits", "tokens", "features"))
    assert all(torch.equal(together[name], apart[name]) for name in apart)
