"""Convnets by their published names: parity with `transformers`, with the ports' own code, with printed tables."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from tests.convnets import small_resnet, timm_state
from tests.golden.fill import fill, image
from vitrail.checkpoints.formats.convnets import infer, to_pair
from vitrail.models import efficientnet
from vitrail.models.efficientnet import EfficientNet, EfficientNetConfig, Stage
from vitrail.models.registry import build
from vitrail.models.regnet import regnet
from vitrail.teachers import open_teacher

# Parameters as torchvision and timm publish them.
COUNTS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet50d": 25_576_264,
    "resnext50_32x4d": 25_028_904,
    "resnext50d_32x4d": 25_048_136,
    "wide_resnet50_2": 68_883_240,
    "regnety_040": 20_646_656,
    "regnety_080": 39_180_068,
    "regnety_080_tv": 39_381_472,
    "regnety_120": 51_822_544,
    "regnety_160": 83_590_140,
}
REGNETX = regnet((2, 6, 15, 2), (96, 192, 432, 1008), 48, squeeze=False)  # RegNetX-3.2GF: 15,296,552 parameters
CIFAR = {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018, 110: 1_727_962}  # depth -> parameters
LITE = {  # depths, widths, parameters, logits that the port's own code gives for the filled network
    0: ((1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320), 4_652_008, [-0.1487, 0.1210, 0.2636, -0.2834, -0.4067]),
    1: ((1, 3, 3, 4, 4, 5, 1), (16, 24, 40, 80, 112, 192, 320), 5_416_680, [-0.1289, 0.0071, 0.1457, 0.0604, -0.4918]),
    2: ((1, 3, 3, 4, 4, 5, 1), (16, 24, 48, 88, 120, 208, 352), 6_092_072, [-0.2793, -0.0933, 0.3164, -0.1393, -0.1047]),
    3: ((1, 3, 3, 5, 5, 6, 1), (24, 32, 48, 96, 136, 232, 384), 8_197_096, [-0.1528, 0.2663, 0.2821, -0.2531, -0.0183]),
    4: ((1, 4, 4, 6, 6, 8, 1), (24, 32, 56, 112, 160, 272, 448), 13_006_568, [-0.1524, 0.4426, 0.5824, -0.2763, -0.5010]),
}
LITE_SIZES = {0: 224, 1: 240, 2: 260, 3: 280, 4: 300}


def cifar(depth, **changes):
    plan = {"root_stride": 1, "shortcut": "pad"} | changes
    return small_resnet(((depth - 2) // 6,) * 3, 16, classes=10, **plan)


def lite(number, classes=1000):
    depths, widths, *_ = LITE[number]
    rest = zip(depths, widths, (3, 3, 5, 3, 5, 5, 3), (1, 6, 6, 6, 6, 6, 6), strict=True)
    return EfficientNetConfig(tuple(Stage(*each) for each in rest), classes=classes)


def on_meta(make):
    with torch.device("meta"):
        return make().eval()


def shapes(network):
    return {key: tuple(value.shape) for key, value in network.state_dict().items()}


def exported(model):
    """The shapes of its tensors in timm's names."""
    return {to_pair(key, model.architecture).theirs[0]: shape for key, shape in shapes(model).items()}


def parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def shake(network):
    """Random weights and statistics of a size that keeps signals alive."""
    for key, value in network.state_dict().items():
        if key.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif value.is_floating_point() and value.dim() == 1:
            value.uniform_(-0.2, 0.2).add_(1.0 if ("norm" in key and key.endswith("weight")) or ".bn" in key else 0.0)
        elif value.is_floating_point():
            nn.init.kaiming_normal_(value)
    return network.eval()


@pytest.mark.parametrize("name", COUNTS)
def test_convnets_are_the_published_ones(name):
    model = vitrail.create(name, device="meta")
    assert parameters(model) == COUNTS[name]
    assert infer(exported(model), {}, None) == model.architecture


def test_grafits_resnext_50d_32x8d():
    """Table 2.10 prints 48 M."""
    assert round(parameters(vitrail.create("resnext50d_32x8d", device="meta")) / 1e6) == 48


def test_a_regnetx():
    model = build(REGNETX, device="meta")
    assert parameters(model) == 15_296_552
    assert infer(exported(model), {}, None) == REGNETX


def test_names_of_a_resnet50():
    keys = exported(vitrail.create("resnet50", device="meta"))
    assert len(keys) == 320  # as torchvision's
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.conv3.weight", "fc.bias"} <= keys.keys()


def test_names_of_a_resnext50d():
    keys = exported(vitrail.create("resnext50d_32x4d", device="meta"))
    assert {"conv1.6.weight", "conv1.4.bias", "layer1.0.downsample.2.bias", "layer2.0.downsample.1.weight"} <= keys.keys()


def test_the_teacher_of_deit():
    """RegNetY-16GF: 83.59 M parameters; 15.91 G multiply-adds, or 15.96 G with two operations per normalized number."""
    network = vitrail.create("regnety_160", device="meta").eval()
    keys = exported(network)
    names = {"stem.bn.bias", "s1.b1.downsample.conv.weight", "s3.b11.se.fc2.bias", "s4.b1.conv3.bn.weight", "head.fc.bias"}
    assert names <= keys.keys()
    normed = []
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _, inputs, output: normed.append(output.numel()))
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        network(torch.empty(1, 3, 224, 224))
    multiplications = counter.get_total_flops() // 2
    assert round(multiplications / 1e9, 2) == 15.91
    assert round((multiplications + 2 * sum(normed)) / 1e9, 2) == 15.96


@pytest.mark.parametrize("depth", CIFAR)
def test_cifar_resnets_are_the_published_ones(depth):
    network = build(cifar(depth), device="meta")
    assert parameters(network) == CIFAR[depth]
    assert infer(exported(network), {}, None) == cifar(depth)


@pytest.mark.parametrize("number", LITE)
def test_efficientnets_are_the_published_ones(number):
    network = on_meta(lambda: EfficientNet(lite(number)))
    assert parameters(network) == LITE[number][2]
    assert efficientnet.infer(shapes(network)) == lite(number)
    assert network.config.size == LITE_SIZES[number]


@pytest.mark.parametrize("number", LITE)
def test_efficientnets_compute_what_the_port_computes(number, tmp_path):
    network = EfficientNet(lite(number, classes=5))
    torch.save({key: torch.from_numpy(fill(key, shape)) for key, shape in shapes(network).items()}, tmp_path / "lite.pth")
    teacher = open_teacher(tmp_path / "lite.pth")
    found = teacher(torch.from_numpy(image(2, 80, 80)))
    torch.testing.assert_close(found[0], torch.tensor(LITE[number][3]), rtol=0, atol=2e-4)
    assert teacher.preprocessing.mean == (127 / 255,) * 3
    assert teacher.preprocessing.image_size == (LITE_SIZES[number],) * 2


HF = {"num_labels": 7, "embedding_size": 8}
RESNET_CASES = [
    {"layer_type": "bottleneck", "hidden_sizes": [16, 32, 64], "depths": [1, 2, 1]},
    {"layer_type": "bottleneck", "hidden_sizes": [16, 32, 64], "depths": [1, 2, 1], "downsample_in_bottleneck": True},
    {"layer_type": "basic", "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1]},
    {"layer_type": "basic", "hidden_sizes": [8, 16], "depths": [1, 1], "downsample_in_first_stage": True},
]
REGNET_CASES = [
    {"layer_type": "y", "hidden_sizes": [16, 24, 48, 64], "depths": [1, 2, 1, 1], "groups_width": 8},
    {"layer_type": "x", "hidden_sizes": [16, 24, 48, 64], "depths": [2, 1, 1, 1], "groups_width": 8},
    {"layer_type": "y", "hidden_sizes": [16, 24], "depths": [1, 1], "groups_width": 8, "downsample_in_first_stage": False},
]
CASES = [("ResNet", case) for case in RESNET_CASES] + [("RegNet", case) for case in REGNET_CASES]


def theirs(kind, options):
    config = getattr(transformers, f"{kind}Config")(**HF, **options)
    return shake(getattr(transformers, f"{kind}ForImageClassification")(config))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_parity_with_transformers(kind, options, tmp_path):
    model = theirs(kind, options)
    model.config.id2label = {index: f"thing {index}" for index in range(7)}
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"crop_pct": 0.9, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": 224, "resample": 3}'
    )
    teacher = open_teacher(tmp_path)
    images = torch.randn(2, 3, 70, 97)
    with torch.no_grad():
        base = getattr(model, kind.lower())(images)
        torch.testing.assert_close(teacher(images), model(images).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(teacher.features(images), base.pooler_output.flatten(1), rtol=1e-4, atol=1e-4)
        maps = base.last_hidden_state.movedim(1, -1)
        torch.testing.assert_close(teacher.dense(images).movedim(1, -1), model.classifier[1](maps), rtol=1e-4, atol=1e-4)
    assert teacher.class_names == [f"thing {index}" for index in range(7)]
    assert teacher.preprocessing == vitrail.models.preprocessing.Preprocessing(
        (224, 224), 0.9, "shorter", "bicubic", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    )


def renamed(state, squeeze, block, parts, head):
    """A RegNet's tensors under other names, written out: `parts` are the names of (stem, conv1, conv2, se, conv3, shortcut)."""
    found = {}
    for key, value in state.items():
        words = key.split(".")
        leaf = words[-1]
        kind = {"convolution": 0, "normalization": 1}.get(words[-2])
        if words[0] == "classifier":
            found[f"{head}.{leaf}"] = value
        elif words[1] == "embedder":
            found[f"{parts[0][kind]}.{leaf}"] = value
        else:
            stage, index, inside = int(words[3]), int(words[5]), words[6:]
            if inside[0] == "shortcut":
                name = parts[5][kind]
            elif "attention" in inside:
                name = parts[3][int(inside[3]) // 2]
            else:
                place = int(inside[1])
                name = parts[4 if place == 3 or (place == 2 and not squeeze) else 1 + place][kind]
            found[f"{block(stage, index)}.{name}.{leaf}"] = value
    return found


TIMM = (
    lambda stage, index: f"s{stage + 1}.b{index + 1}",
    [
        *(("stem.conv", "stem.bn"), ("conv1.conv", "conv1.bn"), ("conv2.conv", "conv2.bn")),
        *(("se.fc1", "se.fc2"), ("conv3.conv", "conv3.bn"), ("downsample.conv", "downsample.bn")),
    ],
    "head.fc",
)
TORCHVISION = (
    lambda stage, index: f"trunk_output.block{stage + 1}.block{stage + 1}-{index}",
    [
        *(("stem.0", "stem.1"), ("f.a.0", "f.a.1"), ("f.b.0", "f.b.1")),
        *(("f.se.fc1", "f.se.fc2"), ("f.c.0", "f.c.1"), ("proj.0", "proj.1")),
    ],
    "fc",
)


@pytest.mark.parametrize("naming", [TIMM, TORCHVISION], ids=["timm", "torchvision"])
@pytest.mark.parametrize("options", REGNET_CASES[:2], ids=["y", "x"])
def test_a_regnet_by_either_names(options, naming, tmp_path):
    model = theirs("RegNet", options)
    state = renamed(model.state_dict(), options["layer_type"] == "y", *naming)
    torch.save({"model": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "regnet.pth")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(open_teacher(tmp_path / "regnet.pth")(images), model(images).logits, rtol=1e-4, atol=1e-4)


def reference_cifar(state, images, blocks):
    """The CIFAR ResNet as its port writes it, in plain functions."""

    def norm(x, name):
        values = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *values)

    x = norm(F.conv2d(images, state["conv1.weight"], padding=1), "bn1").relu()
    for stage, planes in ((1, 16), (2, 32), (3, 64)):
        for index in range(blocks):
            name, stride = f"layer{stage}.{index}", 2 if stage > 1 and index == 0 else 1
            out = norm(F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1), f"{name}.bn1").relu()
            out = norm(F.conv2d(out, state[f"{name}.conv2.weight"], padding=1), f"{name}.bn2")
            if stride == 2:
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4))
            x = (out + x).relu()
    return F.linear(F.avg_pool2d(x, x.shape[3]).flatten(1), state["linear.weight"], state["linear.bias"])


def test_a_cifar_resnet_by_its_ports_names(tmp_path):
    network = shake(build(cifar(20)))
    state = {key.replace("fc.", "linear."): value for key, value in timm_state(network).items() if "tracked" not in key}
    torch.save({"best_prec1": 91.0, "state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "it.th")
    teacher = open_teacher(tmp_path / "it.th")
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(teacher(images), reference_cifar(state, images, 3), rtol=1e-4, atol=1e-4)
    assert teacher.size == (32, 32)
    assert teacher.preprocessing.image_size == (32, 32)
    assert teacher.preprocessing.crop_ratio == 1.0


def test_a_cifar_resnet_with_convolutions_in_its_shortcuts(tmp_path):
    network = shake(build(cifar(20, shortcut="conv")))
    state = {key.replace("downsample.", "shortcut."): value for key, value in timm_state(network).items()}
    torch.save(state, tmp_path / "it.pth")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(open_teacher(tmp_path / "it.pth")(images), network(images))


def test_weights_of_keras(tmp_path):
    """The stride on the first convolution, another epsilon, blue first, values up to 255."""
    network = shake(build(small_resnet((1, 1, 1, 1), bottleneck=True, stride_in_1x1=True, eps=1e-3)))
    state = {to_pair(key, network.architecture).theirs[0]: value for key, value in network.state_dict().items()}
    torch.save({key: value.half() for key, value in state.items() if "tracked" not in key}, tmp_path / "it.pt")
    network.load_state_dict(network.half().state_dict())
    network.float()
    teacher = open_teacher(tmp_path / "it.pt", kind="resnet_keras")
    pixels = torch.randint(0, 256, (2, 3, 64, 64)).float()
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    student = (pixels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = pixels.flip(1) - torch.tensor([103.939, 116.779, 123.68])[:, None, None]
    torch.testing.assert_close(teacher.adapt(student, mean, std), expected, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(teacher(student, mean, std), network(expected), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("layer2.0.bn1.bias"), r"the tensor 'layer2.0.bn1.bias' of a convnet is missing"),
        (lambda state: state.pop("fc.weight"), r"the tensor 'fc.weight' of a convnet is missing"),
        (lambda state: state.update({"layer1.0.se.fc1.weight": torch.zeros(2, 2)}), r"do not belong to a"),
        (lambda state: state.update({"bn1.weight": torch.zeros(3)}), r"has shape \(3,\)"),
        (lambda state: state.update({"bn1.weight": torch.zeros(16, dtype=torch.int32)}), r"torch.int32"),
        (lambda state: state.update({"layer1.0.conv1.weight": torch.zeros(())}), r"does not match"),
    ],
)
def test_damaged_convnets_get_a_sentence(change, says, tmp_path):
    state = timm_state(cifar(20))
    change(state)
    torch.save(state, tmp_path / "it.pth")
    with pytest.raises(vitrail.UserError, match=says) as caught:
        open_teacher(tmp_path / "it.pth")
    assert str(tmp_path) in str(caught.value)
