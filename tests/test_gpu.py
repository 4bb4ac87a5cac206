"""On a GPU: every structure against a float64 reference, mixed precision, a compiled step, image loading.

`tests/data/test_transform_kernels.py` compares each augmentation kernel with its reference.
"""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.data.test_loader import COUNT, Images, epoch_batches
from tests.data.test_transform_parts import images
from tests.data.test_transforms import PIPELINES, keys
from tests.models.test_every_model import loss, randomize
from tests.small import structures
from vitrail.data.image_cache import CachedLoader, build_cache
from vitrail.data.loader import WorkerLoader
from vitrail.data.rng import sample_key
from vitrail.data.sampler import EpochSampler
from vitrail.data.transforms.pipeline import augment
from vitrail.models.registry import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", structures())
def test_float32_and_bfloat16_against_float64(name):
    model = randomize(build(structures()[name])).eval()
    image = torch.randn(4, 3, *model.architecture.image_size)
    with torch.inference_mode():
        exact = model.double()(image.double())
        model = model.float().cuda()
        single = model(image.cuda()).cpu().double()
        with torch.autocast("cuda", torch.bfloat16):
            half = model(image.cuda()).cpu().double()
    scale = exact.abs().max()
    assert (single - exact).abs().max() <= 1e-4 * scale
    assert half.isfinite().all()
    assert (half - exact).abs().max() <= 0.2 * scale


@pytest.mark.parametrize("name", structures())
def test_a_compiled_training_step_gives_the_eager_gradients(name):
    model = randomize(build(structures()[name])).cuda().train()
    image = torch.randn(4, 3, *model.architecture.image_size, device="cuda")

    def step(model, image, run):
        model.zero_grad()
        value = loss(run(image))
        value.backward()
        return value.item(), {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    def distance(found, expected):
        return sum((found[key].double() - expected[key].double()).square().sum() for key in expected).sqrt()

    eager, gradients = step(model, image, model.outputs)
    torch.compiler.reset()
    compiled, others = step(model, image, torch.compile(model.outputs, fullgraph=True))
    assert compiled == pytest.approx(eager, rel=1e-2)
    norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt()
    # BatchNorm of four images amplifies rounding: eager float32 may be as far from float64.
    exact = copy.deepcopy(model).double()
    rounding = distance(gradients, step(exact, image.double(), exact.outputs)[1])
    assert distance(others, gradients) <= max(2e-2 * norm, 3 * rounding)


def check_alike(found, expected, augmentation):
    """Equal up to one intensity level, except for few pixels where an operation amplifies a difference of one level."""
    torch.testing.assert_close(found.matrix.cpu(), expected.matrix.cpu(), rtol=1e-4, atol=1e-3)
    apart = (found.images.cpu() - expected.images.cpu()).abs() * torch.tensor(augmentation.std)[:, None, None] * 255
    assert (apart > 1.01).float().mean() < 2e-3
    assert (apart > 0.01).float().mean() < 1e-2


@pytest.fixture
def no_sync():
    """Run a function that raises if it synchronizes the device."""

    def guard(run, *arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guard


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", PIPELINES)
def test_augmentation_equals_the_cpu_and_does_not_synchronize(name, layout, no_sync):
    augmentation, batch = PIPELINES[name], images(48, 60, 80).to(memory_format=layout)
    sizes = torch.tensor([[60, 80], [33, 80], [60, 41], [50, 50]]).repeat(12, 1)
    found = no_sync(augment, batch.cuda(), sizes.cuda(), keys(48).cuda(), augmentation)
    check_alike(found, augment(batch, sizes, keys(48), augmentation), augmentation)


@pytest.mark.parametrize("name", PIPELINES)
def test_augmentation_compiles_as_one_graph(name):
    augmentation, batch = PIPELINES[name], images(16, 60, 80).cuda()
    sizes = torch.tensor([[60, 80]] * 16).cuda()
    torch.compiler.reset()
    compiled = torch.compile(augment, fullgraph=True)
    for epoch in (0, 1):
        key = keys(16, epoch).cuda()
        found, expected = compiled(batch, sizes, key, augmentation), augment(batch, sizes, key, augmentation)
        check_alike(found, expected, augmentation)


@pytest.mark.parametrize("location", ["files", "device"])
def test_batches_on_the_device_equal_those_on_the_cpu(location):
    """Decoded by workers into pinned memory, or cached on the device: the same images and augmentations."""
    source, sampler, augmentation = Images(), EpochSampler(COUNT, 8, seed=3, repeats=3), PIPELINES["lvvit"]

    def seen(batch):
        return augment(batch.pixels, batch.sizes, sample_key(3, 1, batch.index, batch.repeat), augmentation)

    loader = (
        CachedLoader(build_cache(source, "cuda", workers=2), sampler)
        if location == "device"
        else WorkerLoader(source, sampler, workers=2)
    )
    batches = list(epoch_batches(loader, 1))
    loader.close()
    assert len(batches) == sampler.steps
    if location == "device":
        assert len({batch.pixels.shape[2:] for batch in batches}) == 1, "a CUDA graph needs batches of one shape"
    for batch, expected in zip(batches, epoch_batches(WorkerLoader(source, sampler, workers=0), 1), strict=True):
        assert batch.pixels.is_cuda if location == "device" else batch.pixels.is_pinned()
        batch = batch.to("cuda")
        for name in ("sizes", "index", "repeat", "position", "labels"):
            assert torch.equal(getattr(batch, name).cpu(), getattr(expected, name))
        bottom, right = (ours - theirs for ours, theirs in zip(batch.pixels.shape[2:], expected.pixels.shape[2:], strict=True))
        assert torch.equal(batch.pixels.cpu(), F.pad(expected.pixels, (0, right, 0, bottom)))
        check_alike(seen(batch), seen(expected), augmentation)
