"""On a GPU: every structure against a float64 reference, mixed precision, and a compiled step."""

import pytest
import torch

from tests.models.test_every_model import loss, randomise
from tests.small import structures
from vitrail.models.catalogue import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", structures())
def test_float32_and_bfloat16_against_float64(name):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = randomise(build(structures()[name])).eval()
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
    model = randomise(build(structures()[name])).cuda().train()
    image = torch.randn(4, 3, *model.architecture.image_size, device="cuda")

    def step(run):
        model.zero_grad()
        value = loss(run(image))
        value.backward()
        return value.item(), {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    eager, gradients = step(model.outputs)
    torch.compiler.reset()
    compiled, others = step(torch.compile(model.outputs, fullgraph=True))
    assert compiled == pytest.approx(eager, rel=1e-2)
    norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt()
    gap = sum((gradients[key] - others[key]).square().sum() for key in gradients).sqrt()
    assert gap <= 2e-2 * norm
