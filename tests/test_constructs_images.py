"""Pooling, resampling, unfolding, shuffling and Fourier transforms under all four modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parametrise, run, tensor
from torch import nn


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def after_conv(function: Any, dims: int = 2) -> Any:
    """Return a model maker: a convolution, then `function` of its output."""
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return lambda: Body(lambda m, x: function(m.conv(x)), conv=conv(2, 3, 1))


def image(name: str, function: Any, *shape: int, sizes: Any = (7,), **options: Any) -> Construct:
    return Construct(
        name, after_conv(function, len(shape)), tensor(2, *shape), sizes=sizes, **options
    )


def unpooled(pool: Any, unpool: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        y, indices = pool(x, 2, return_indices=True)
        return unpool(y.sin(), indices, 2)

    return function


POOLS = [
    image("maxpool1d", lambda x: F.max_pool1d(x, 2), 6, sizes=(7, 2)),
    image("maxpool2d", lambda x: F.max_pool2d(x, 3, 2, 1), 5, 5, sizes=(8, 7, 2, 1)),
    image("maxpool2d-ceil-dilated", lambda x: F.max_pool2d(x, 2, 2, 0, 2, ceil_mode=True), 6, 6),
    image("maxpool3d", lambda x: F.max_pool3d(x, 2), 4, 4, 4),
    image("avgpool1d", lambda x: F.avg_pool1d(x, 2), 6),
    image(
        "avgpool2d", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), 5, 5, sizes=(7, 2)
    ),
    image("avgpool3d", lambda x: F.avg_pool3d(x, 2), 4, 4, 4),
    image("adaptive-avg1d", lambda x: F.adaptive_avg_pool1d(x, 3), 5),
    image("adaptive-avg2d", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), 5, 5, sizes=(7, 2)),
    image("adaptive-avg2d-one", lambda x: F.adaptive_avg_pool2d(x, 1), 5, 5),
    image("adaptive-avg3d", lambda x: F.adaptive_avg_pool3d(x, (2, 1, 2)), 3, 3, 3),
    image("adaptive-max1d", lambda x: F.adaptive_max_pool1d(x, 3), 5),
    image("adaptive-max2d", lambda x: F.adaptive_max_pool2d(x, (2, 3)), 5, 5, sizes=(7, 2)),
    image("adaptive-max3d", lambda x: F.adaptive_max_pool3d(x, (2, 1, 2)), 3, 3, 3),
    image("lppool1d", lambda x: F.lp_pool1d(x.exp(), 3, 2), 6),
    image("lppool2d", lambda x: F.lp_pool2d(x.exp(), 2, 2), 4, 4),
    image(
        "fractional2d", lambda x: F.fractional_max_pool2d(x, 2, output_size=2), 5, 5, sizes=(7, 2)
    ),
    image("fractional3d", lambda x: F.fractional_max_pool3d(x, 2, output_size=2), 4, 4, 4),
    image("unpool1d", unpooled(F.max_pool1d, F.max_unpool1d), 6),
    image("unpool2d", unpooled(F.max_pool2d, F.max_unpool2d), 4, 4, sizes=(7, 2)),
    image("unpool3d", unpooled(F.max_pool3d, F.max_unpool3d), 4, 4, 4),
]

RESAMPLING = [
    image(f"interpolate-{mode}-{'size' if size else 'scale'}",
          lambda x, mode=mode, size=size, more=more: F.interpolate(
              x, size=size, scale_factor=None if size else 1.5, mode=mode, **more),
          *shape, sizes=(7, 2) if shape == (4, 4) else (7,))
    for mode, shape, size, more in (
        ("nearest", (4,), None, {}), ("linear", (4,), (7,), {}),
        ("nearest", (4, 4), (5, 6), {}), ("bilinear", (4, 4), None, {"align_corners": True}),
        ("bicubic", (4, 4), (5, 6), {}), ("area", (4, 4), (2, 3), {}),
        ("nearest-exact", (4, 4), None, {}), ("nearest", (3, 3, 3), None, {}),
        ("trilinear", (3, 3, 3), (4, 4, 4), {}),
    )
]  # fmt: skip
RESAMPLING += [
    image("interpolate-antialias", lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True), 5, 5),
    image("interpolate-antialias-cubic",
          lambda x: F.interpolate(x, (3, 2), mode="bicubic", antialias=True), 5, 5),
    image("upsample-recompute", lambda x: F.interpolate(
        x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True), 4, 4),
    *(
        image(f"pad-{mode}-{len(shape)}", lambda x, mode=mode, pad=pad: F.pad(x, pad, mode=mode), *shape)
        for mode in ("constant", "reflect", "replicate", "circular")
        for shape, pad in (((4,), (1, 2)), ((4, 4), (1, 1, 2, 0)), ((3, 3, 3), (1, 1, 0, 1, 1, 0)))
    ),
    Construct("grid-sample", lambda: Body(
        lambda m, x, g: F.grid_sample(m.conv(x), m.grid(g).tanh(), align_corners=False),
        conv=nn.Conv2d(2, 3, 1), grid=nn.Linear(2, 2)),
        lambda n: (torch.randn(n, 2, 4, 4), torch.randn(n, 3, 3, 2)), sizes=(7, 2)),
    Construct("grid-sample-3d", lambda: Body(
        lambda m, x, g: F.grid_sample(m.conv(x), m.grid(g).tanh(), align_corners=True, mode="nearest"),
        conv=nn.Conv3d(2, 3, 1), grid=nn.Linear(3, 3)),
        lambda n: (torch.randn(n, 2, 3, 3, 3), torch.randn(n, 2, 2, 2, 3)), sizes=(7,)),
    Construct("spatial-transformer", lambda: Body(
        lambda m, x: F.grid_sample(
            x, F.affine_grid(m.theta(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False),
            padding_mode="border", align_corners=False),
        theta=nn.Linear(32, 6)), tensor(2, 4, 4), sizes=(8, 7, 2)),
    Construct("affine-grid-3d", lambda: Body(
        lambda m, x: F.affine_grid(m.theta(x).view(-1, 3, 4), (x.shape[0], 1, 2, 2, 2),
                                   align_corners=True), theta=nn.Linear(5, 12)),
        tensor(5), sizes=(7,)),
]  # fmt: skip

SHUFFLES = [
    image("pixel-shuffle", lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 2, 2, sizes=(7, 2)),
    image("pixel-unshuffle", lambda x: F.pixel_unshuffle(x, 2), 4, 4, sizes=(7, 2)),
    image("channel-shuffle", lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 2), 2, 2),
    image("unfold", lambda x: F.unfold(x, 2, stride=2), 4, 4, sizes=(8, 7, 2)),
    image("fold", lambda x: F.fold(F.unfold(x, 2).sin(), (4, 4), 2), 4, 4, sizes=(7, 2)),
    image("tensor-unfold", lambda x: x.unfold(2, 2, 1).unfold(3, 2, 2).sin(), 4, 4, sizes=(7, 2)),
    image("flip-roll", lambda x: x.flip(-1).roll((1, 2), (1, 2)) * x, 3, 3, sizes=(7, 2)),
    image("rot90", lambda x: torch.rot90(x, 1, (2, 3)).sin(), 3, 3),
    image("roll-over-batch", lambda x: x.roll(1, 0) * x, 3, 3, gathers=True),
    image("flip-over-batch", lambda x: x.flip(0) * x, 3, 3, gathers=True),
    image("mean-std", lambda x: (x - x.mean((2, 3), keepdim=True)) / (1 + x.std((2, 3), keepdim=True)),
          3, 3, sizes=(7, 2)),
    image("diff-std-over-batch", lambda x: x / x.std(0, keepdim=True), 3, 3, sizes=(7, 2)),
]  # fmt: skip

FOURIER = [
    image("rfft", lambda x: torch.fft.rfft(x), 6, sizes=(8, 7, 2)),
    image("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2j, n=6), 6, sizes=(7, 2)),
    image("fft2", lambda x: torch.fft.fft2(x).abs(), 4, 4, sizes=(7, 2)),
    image("fftshift", lambda x: torch.fft.fftshift(torch.fft.fft2(x), dim=(2, 3)).real, 4, 4),
    image("fnet", lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real, 3, 4, sizes=(7, 2)),
    image("rfftn-irfftn", lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 3)).conj(), (3, 4),
                                                     dim=(2, 3)), 3, 4),
    image("fft-over-batch", lambda x: torch.fft.fft(x, dim=0).abs(), 3, 3, gathers=True),
    Construct("stft", lambda: Body(
        lambda m, x: torch.view_as_real(torch.stft(
            m.a(x), 4, 2, window=m.window, return_complex=True)),
        a=nn.Linear(8, 8), window=torch.hann_window(4)), tensor(8), sizes=(7,)),
    Construct("spectral-convolution", lambda: Body(
        lambda m, x: torch.fft.irfft(torch.einsum("bix,iox->box", torch.fft.rfft(x), m.w), n=6),
        w=nn.Parameter(torch.randn(2, 3, 4, dtype=torch.complex128))), tensor(2, 6)),
]  # fmt: skip


@parametrise(POOLS + RESAMPLING)
def test_pools_and_resampling_divide_the_batch(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(SHUFFLES + FOURIER)
def test_shuffles_and_transforms_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)
