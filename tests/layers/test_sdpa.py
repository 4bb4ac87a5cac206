"""Which kernels torch may choose from, and that nothing stays switched."""

from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers import sdpa
from vitrail.layers.sdpa import ALL_BUT_CUDNN, FOR_FEW, attend


def switches():
    return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]


def on_a_gpu(tokens):
    return SimpleNamespace(is_cuda=True, shape=(2, 3, tokens, 8))


@pytest.mark.parametrize("outside", [[], [SDPBackend.FLASH_ATTENTION], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]], ids=len)
@pytest.mark.parametrize(
    ("tokens", "dropout", "kinds"),
    [(50, 0.0, FOR_FEW), (64, 0.0, FOR_FEW), (192, 0.0, ALL_BUT_CUDNN), (197, 0.1, ALL_BUT_CUDNN), (197, 0.0, None)],
)
@pytest.mark.parametrize("fails", [False, True])
def test_the_kernels_are_those_of_torchs_own_switch(monkeypatch, outside, tokens, dropout, kinds, fails):
    """Whatever is switched around it, also when attention fails; without its context manager, which is slow."""
    seen = []

    def fake(*arguments, **options):
        seen.append(switches())
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", fake)
    with sdpa_kernel(outside) if outside else torch.no_grad():
        before = switches()
        wanted = before
        if kinds is not None:
            with sdpa_kernel(kinds):
                wanted = switches()
        monkeypatch.setattr(sdpa, "sdpa_kernel", None)
        try:
            attend(*[on_a_gpu(tokens)] * 3, dropout=dropout)
        except RuntimeError:
            assert fails
        assert switches() == before
    assert seen == [wanted]
