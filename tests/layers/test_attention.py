"""Backends of scaled dot-product attention, and that the global switches are restored."""

from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers import attention
from vitrail.layers.attention import BACKENDS_WITHOUT_CUDNN, SHORT_BACKENDS, scaled_dot_product_attention


def switches():
    return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]


def on_a_gpu(tokens):
    return SimpleNamespace(is_cuda=True, shape=(2, 3, tokens, 8))


@pytest.mark.parametrize("outside", [[], [SDPBackend.FLASH_ATTENTION], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]], ids=len)
@pytest.mark.parametrize(
    ("tokens", "dropout", "backends"),
    [
        (50, 0.0, SHORT_BACKENDS),
        (64, 0.0, SHORT_BACKENDS),
        (192, 0.0, BACKENDS_WITHOUT_CUDNN),
        (197, 0.1, BACKENDS_WITHOUT_CUDNN),
        (197, 0.0, None),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_backends_are_those_of_sdpa_kernel(monkeypatch, outside, tokens, dropout, backends, fails):
    """Whatever is switched around it, also when attention fails; without its context manager, which is slow."""
    seen = []

    def fake(*arguments, **options):
        seen.append(switches())
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fake)
    with sdpa_kernel(outside) if outside else torch.no_grad():
        before = switches()
        wanted = before
        if backends is not None:
            with sdpa_kernel(backends):
                wanted = switches()
        monkeypatch.setattr(attention, "sdpa_kernel", None)
        try:
            scaled_dot_product_attention(*[on_a_gpu(tokens)] * 3, dropout=dropout)
        except RuntimeError:
            assert fails
        assert switches() == before
    assert seen == [wanted]
