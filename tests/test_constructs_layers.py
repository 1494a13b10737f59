"""Recurrent layers, convolutions, normalisations and lookups under all four modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parametrise, run, tensor
from torch import nn
from torch.nn.utils import parametrizations


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ids(*shape: int, high: int = 10) -> Any:
    return lambda n: (torch.randint(0, high, (n, *shape)),)


def recurrent(layer: Any) -> Any:
    return lambda: Body(lambda m, x: m.layer(x), layer=layer())


def old_spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 3))


def linear_then(layer: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(4, 6), layer())


def bag(mode: str, **options: Any) -> Any:
    return lambda: nn.EmbeddingBag(10, 4, mode=mode, **options)


def bag_of_offsets(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, 4, (n,))
    lengths[0] += 1
    return torch.randint(0, 10, (int(lengths.sum()),)), lengths.cumsum(0) - lengths


RECURRENT = [
    Construct("lstm", recurrent(lambda: nn.LSTM(3, 4, batch_first=True)), tensor(3, 3)),
    Construct("lstm-two-layers-both-ways",
              recurrent(lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)),
              tensor(2, 3), sizes=(7,)),
    Construct("lstm-projection", recurrent(lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True)),
              tensor(2, 3), sizes=(7,)),
    Construct("lstm-time-first", recurrent(lambda: nn.LSTM(3, 4)),
              lambda n: (torch.randn(3, n, 3),), sizes=(5,), gathers=True),
    Construct("gru", recurrent(lambda: nn.GRU(3, 4, batch_first=True)), tensor(3, 3)),
    Construct("rnn-relu", recurrent(lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True)),
              tensor(2, 3), sizes=(7,)),
    Construct("lstm-cell", lambda: nn.LSTMCell(3, 4), tensor(3)),
    Construct("gru-cell", lambda: nn.GRUCell(3, 4), tensor(3), sizes=(7,)),
]  # fmt: skip

CONVOLUTIONS = [
    Construct("conv1d", lambda: nn.Conv1d(2, 3, 3, padding=1), tensor(2, 5)),
    Construct("conv2d", lambda: nn.Conv2d(2, 3, 3, stride=2), tensor(2, 5, 5), sizes=(8, 7, 2, 1)),
    Construct("conv3d", lambda: nn.Conv3d(2, 3, 2), tensor(2, 3, 3, 3)),
    Construct("conv-grouped", lambda: nn.Conv2d(4, 6, 3, groups=2), tensor(4, 4, 4), sizes=(7,)),
    Construct("conv-depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), tensor(4, 4, 4)),
    Construct("conv-dilated-same", lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"),
              tensor(2, 5, 5), sizes=(7,)),
    Construct("conv-circular", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
              tensor(2, 4, 4), sizes=(7,)),
    Construct("conv-reflect", lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"),
              tensor(2, 4), sizes=(7,)),
    Construct("transposed1d", lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), tensor(2, 4)),
    Construct("transposed2d", lambda: nn.ConvTranspose2d(2, 4, 3, output_padding=1, stride=2),
              tensor(2, 3, 3)),
    Construct("transposed-grouped", lambda: nn.ConvTranspose2d(4, 4, 2, groups=2),
              tensor(4, 3, 3), sizes=(7,)),
    Construct("transposed3d", lambda: nn.ConvTranspose3d(2, 3, 2), tensor(2, 2, 2, 2), sizes=(7,)),
    Construct("conv-channels-last", lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 4, 3)).to(memory_format=torch.channels_last),
              lambda n: (torch.randn(n, 4, 6, 6).contiguous(memory_format=torch.channels_last),)),
]  # fmt: skip

NORMS = [
    Construct("batchnorm1d", linear_then(lambda: nn.BatchNorm1d(6)), tensor(4), sizes=(8, 7, 2)),
    Construct("batchnorm1d-3d", lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)),
              tensor(2, 4)),
    Construct("batchnorm2d", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
              tensor(2, 4, 4), sizes=(8, 7, 2, 1)),
    Construct("batchnorm3d", lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)),
              tensor(2, 3, 3, 3), sizes=(7,)),
    Construct("batchnorm-momentum-none", linear_then(lambda: nn.BatchNorm1d(6, momentum=None)),
              tensor(4)),
    Construct("batchnorm-plain",
              linear_then(lambda: nn.BatchNorm1d(6, affine=False, track_running_stats=False)),
              tensor(4), sizes=(7,)),
    Construct("batchnorm-eval", lambda: linear_then(lambda: nn.BatchNorm1d(6))().eval(), tensor(4)),
    Construct("instancenorm", lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True)), tensor(2, 4, 4)),
    Construct("instancenorm-tracked", lambda: nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
              tensor(2, 5)),
    Construct("instancenorm3d", lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.InstanceNorm3d(2)),
              tensor(1, 3, 3, 3), sizes=(7,)),
    Construct("groupnorm", lambda: nn.Sequential(nn.Conv2d(2, 6, 2), nn.GroupNorm(3, 6)),
              tensor(2, 4, 4), sizes=(8, 7, 2, 1)),
    Construct("layernorm", linear_then(lambda: nn.LayerNorm(6)), tensor(4), sizes=(8, 7, 2, 1)),
    Construct("layernorm-two-dims", lambda: nn.LayerNorm((3, 4)), tensor(2, 3, 4)),
    Construct("layernorm-plain", linear_then(lambda: nn.LayerNorm(6, elementwise_affine=False)),
              tensor(4), sizes=(7,)),
    Construct("rmsnorm", linear_then(lambda: nn.RMSNorm(6)), tensor(4)),
    Construct("lrn", lambda: nn.Sequential(nn.Conv2d(2, 6, 2), nn.LocalResponseNorm(3)),
              tensor(2, 4, 4)),
    Construct("weight-norm", lambda: parametrizations.weight_norm(nn.Linear(4, 3)), tensor(4)),
    Construct("weight-norm-conv", lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 2)),
              tensor(2, 4), sizes=(7,)),
    Construct("spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), tensor(4)),
    Construct("spectral-norm-old", old_spectral, tensor(4)),
    Construct("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4)), tensor(4), sizes=(7,)),
    Construct("normalize", lambda: Body(lambda m, x: F.normalize(m.a(x), dim=1), a=nn.Linear(4, 3)),
              tensor(4)),
]  # fmt: skip

LOOKUPS = [
    Construct("embedding", lambda: nn.Embedding(10, 4), ids(3), sizes=(8, 7, 2, 1)),
    Construct("embedding-padding", lambda: nn.Embedding(10, 4, padding_idx=2), ids(3, high=4)),
    Construct("embedding-max-norm", lambda: nn.Embedding(10, 4, max_norm=0.7), ids(3)),
    Construct("embedding-by-frequency", lambda: nn.Embedding(10, 4, scale_grad_by_freq=True),
              ids(3, high=4), gathers=True),
    Construct("bag-sum", bag("sum"), ids(3)),
    Construct("bag-mean", bag("mean"), ids(3)),
    Construct("bag-max", bag("max"), ids(3)),
    Construct("bag-mean-padding", bag("mean", padding_idx=1), ids(4, high=3)),
    Construct("bag-sum-frequency", bag("sum", scale_grad_by_freq=True), ids(3, high=4),
              falls_back=frozenset({"aten._embedding_bag.default", "aten._embedding_bag_backward.default"})),
    Construct("bag-sum-offsets", bag("sum"), bag_of_offsets, sizes=(7, 2)),
    Construct("bag-mean-offsets", bag("mean", include_last_offset=False), bag_of_offsets,
              sizes=(7, 2)),
    Construct("bag-max-padding-offsets", bag("max", padding_idx=1), bag_of_offsets, sizes=(7,)),
    Construct("bag-max-norm", bag("sum", max_norm=0.7), ids(3), sizes=(7,)),
    Construct("bag-weights", lambda: Body(lambda m, i, w: m.bag(i, per_sample_weights=w.sin()),
                                          bag=nn.EmbeddingBag(10, 4, mode="sum")),
              lambda n: (torch.randint(0, 10, (n, 3)), torch.randn(n, 3))),
    Construct("tied", lambda: Body(lambda m, i: m.e(i).sin() @ m.e.weight.t(), e=nn.Embedding(10, 4)),
              ids(3)),
    Construct("bilinear", lambda: Body(lambda m, x, y: m.b(x, y), b=nn.Bilinear(3, 4, 5)),
              lambda n: (torch.randn(n, 3), torch.randn(n, 4)), sizes=(8, 7, 2)),
    Construct("prelu", linear_then(lambda: nn.PReLU(6)), tensor(4)),
    Construct("maxout-glu", lambda: nn.Sequential(nn.Linear(4, 6), nn.GLU()), tensor(4)),
]  # fmt: skip

ACTIVATIONS = [
    Construct(name, lambda name=name: nn.Sequential(nn.Linear(4, 6), getattr(nn, name)()), tensor(4),
              sizes=(7,))
    for name in (
        "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU",
        "LogSigmoid", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
        "Softshrink", "Softsign", "Tanh", "Tanhshrink",
    )
]  # fmt: skip
ACTIVATIONS += [
    Construct("softmax", linear_then(lambda: nn.Softmax(-1)), tensor(4)),
    Construct("softmin", linear_then(lambda: nn.Softmin(-1)), tensor(4), sizes=(7,)),
    Construct("log-softmax", linear_then(lambda: nn.LogSoftmax(-1)), tensor(4), sizes=(7,)),
    Construct("softmax-over-batch", linear_then(lambda: nn.Softmax(0)), tensor(4), gathers=True),
    Construct(
        "softmax2d", lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.Softmax2d()), tensor(1, 2, 2)
    ),
    Construct("threshold", linear_then(lambda: nn.Threshold(0.1, -3.0)), tensor(4), sizes=(7,)),
]


@parametrise(RECURRENT + CONVOLUTIONS)
def test_recurrent_layers_and_convolutions_equal_one_device(
    construct: Construct, size: int
) -> None:
    run(construct, size)


@parametrise(NORMS)
def test_normalisations_are_global(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(LOOKUPS + ACTIVATIONS)
def test_lookups_and_activations_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)
