"""Every torch loss, weighted, masked and over the whole batch, under all four modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parametrise, run, tensor
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss(
    name: str, function: Any, batch: Any, outputs: int = 5, sizes: Any = (7, 2), **options: Any
) -> Construct:
    """A linear layer, then `function(logits, *targets)`; several reductions in one step."""

    def model() -> nn.Module:
        return Body(lambda m, x, *more: function(m.a(x), *more), a=nn.Linear(4, outputs))

    return Construct(name, model, batch, sizes=sizes, **options)


def classes(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(0, 5, (n,))


def with_target(*shape: int, make: Any = torch.randn) -> Any:
    return lambda n: (torch.randn(n, 4), make(n, *shape))


def reductions(function: Any, **options: Any) -> Any:
    """Return every reduction of one loss."""
    return lambda *args: [
        function(*args, reduction=kind, **options) for kind in ("mean", "sum", "none")
    ]


def signs(*shape: int) -> Tensor:
    return torch.where(torch.rand(*shape) < 0.5, -1.0, 1.0)


def mixed(n: int) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, 5, (n, 3))
    target[torch.rand(n, 3) < 0.4] = -100
    target[0, 0] = 1
    return torch.randn(n, 3, 4), target


def skewed(n: int) -> tuple[Tensor, Tensor]:
    """Almost every counted token is in the last row."""
    target = torch.full((n, 3), -100)
    target[-1] = torch.tensor([0, 2, 4])
    target[0, 0] = 3
    return torch.randn(n, 3, 4), target


def tokens(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), target.flatten(), **options)


def ctc(
    x: Tensor, target: Tensor, input_lengths: Tensor, lengths: Tensor, **options: Any
) -> Tensor:
    return F.ctc_loss(x.transpose(0, 1).log_softmax(-1), target, input_lengths, lengths, **options)


def spoken(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 6, 4), torch.randint(1, 5, (n, 2)), torch.randint(5, 7, (n,)),
            torch.randint(1, 3, (n,)))  # fmt: skip


def clip_loss(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() * 2.0
    labels = torch.arange(a.shape[0])
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def simclr(x: Tensor) -> Tensor:
    z = F.normalize(torch.cat([x, x.sin()]), dim=-1)
    similar = (z @ z.t()).fill_diagonal_(float("-inf"))
    n = x.shape[0]
    return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def batch_hard(x: Tensor, labels: Tensor) -> Tensor:
    distance = torch.cdist(x, x)
    same = labels[:, None] == labels[None, :]
    furthest = distance.masked_fill(~same, -1.0).amax(1)
    nearest = distance.masked_fill(same, 100.0).amin(1)
    return F.relu(furthest - nearest + 0.5).mean()


def focal(x: Tensor, target: Tensor) -> Tensor:
    entropy = F.cross_entropy(x, target, reduction="none")
    return ((1 - (-entropy).exp()) ** 2 * entropy).sum() / (target > 0).sum()


def dice(x: Tensor, target: Tensor) -> Tensor:
    p = x.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


CLASSIFICATION = [
    loss("cross-entropy", reductions(F.cross_entropy), classes, sizes=(8, 7, 2, 1)),
    loss("cross-entropy-smooth", reductions(F.cross_entropy, label_smoothing=0.2), classes),
    loss("cross-entropy-weights", lambda x, t: F.cross_entropy(x, t, torch.arange(1.0, 6.0)), classes),
    loss("cross-entropy-weights-smooth", lambda x, t: F.cross_entropy(
        x, t, torch.arange(1.0, 6.0), label_smoothing=0.1), classes),
    loss("cross-entropy-ignored", lambda x, t: F.cross_entropy(x, t, ignore_index=2), classes),
    loss("cross-entropy-probabilities", lambda x, t: F.cross_entropy(x, t.softmax(-1)), with_target(5)),
    loss("tokens-ignored", tokens, mixed),
    loss("tokens-in-one-rank", tokens, skewed),
    loss("tokens-channel-second", lambda x, t: F.cross_entropy(x.transpose(1, 2), t), mixed),
    loss("tokens-by-hand", lambda x, t: tokens(x, t, reduction="sum") / (t != -100).sum(), skewed),
    loss("nll", lambda x, t: F.nll_loss(x.log_softmax(-1), t, torch.arange(1.0, 6.0)), classes),
    loss("nll-2d", lambda x, t: F.nll_loss(
        x.log_softmax(-1).transpose(1, 2)[..., None].contiguous(), t[..., None], torch.arange(1.0, 6.0)), mixed),
    loss("bce", lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), with_target(5, make=torch.rand)),
    loss("bce-logits", reductions(F.binary_cross_entropy_with_logits), with_target(5, make=torch.rand)),
    loss("bce-pos-weight", lambda x, t: F.binary_cross_entropy_with_logits(
        x, t, pos_weight=torch.arange(1.0, 6.0)), with_target(5, make=torch.rand)),
    loss("multi-label-margin", reductions(F.multilabel_margin_loss),
         lambda n: (torch.randn(n, 4), torch.tensor([[3, 0, -1, 1, 2]] * n))),
    loss("multi-label-soft-margin", reductions(F.multilabel_soft_margin_loss),
         with_target(5, make=lambda *s: (torch.rand(*s) < 0.5).double())),
    loss("multi-margin", reductions(F.multi_margin_loss), classes),
    loss("multi-margin-weights", lambda x, t: F.multi_margin_loss(
        x, t, p=2, weight=torch.arange(1.0, 6.0)), classes),
    loss("soft-margin", reductions(F.soft_margin_loss), with_target(5, make=signs)),
    loss("hinge-embedding", reductions(F.hinge_embedding_loss), with_target(5, make=signs)),
    loss("focal", focal, classes),
    loss("dice", dice, with_target(5, make=torch.rand)),
    loss("ctc", ctc, spoken),
    loss("ctc-sum-zero-infinity", lambda *a: ctc(*a, reduction="sum", zero_infinity=True), spoken),
    Construct("adaptive-softmax", lambda: Body(
        lambda m, x, t: m.head(m.a(x), t)[1], a=nn.Linear(4, 16),
        head=nn.AdaptiveLogSoftmaxWithLoss(16, 10, [3, 6], div_value=2.0)),
        lambda n: (torch.randn(n, 4), torch.tensor([9, 0, 4, 2, 7, 1, 5, 3])[:n]), sizes=(7,),
        gathers=True),
]  # fmt: skip

REGRESSION = [
    loss("mse", reductions(F.mse_loss), with_target(5), sizes=(8, 7, 2, 1)),
    loss("l1", reductions(F.l1_loss), with_target(5)),
    loss("smooth-l1", reductions(F.smooth_l1_loss, beta=0.5), with_target(5)),
    loss("huber", reductions(F.huber_loss, delta=0.5), with_target(5)),
    loss("kl", lambda x, t: [F.kl_div(x.log_softmax(-1), t.softmax(-1), reduction=kind)
                             for kind in ("sum", "none", "batchmean")], with_target(5)),
    loss("kl-log-target", lambda x, t: F.kl_div(
        x.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean"), with_target(5)),
    loss("poisson", lambda x, t: F.poisson_nll_loss(x, t, full=True), with_target(5, make=torch.rand)),
    loss("gaussian", lambda x, t: F.gaussian_nll_loss(x, t, x.exp()), with_target(5)),
    loss("log-cosh-weighted", lambda x, t: ((x - t).cosh().log() * t.abs()).sum() / t.abs().sum(),
         with_target(5)),
    loss("masked-mean", lambda x, t: ((x - t) ** 2)[:, 0].mean() + ((x * (t > 0)).sum() / (t > 0).sum()),
         with_target(5)),
    loss("integer-mean", lambda x, t: x.mean() * (t > 0).double().mean() + (x > 0).double().mean() * x.sum(),
         with_target(5)),
    loss("r-squared", lambda x, t: ((x - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(), with_target(5)),
    loss("quantile", lambda x, t: torch.maximum(0.9 * (t - x), -0.1 * (t - x)).mean(), with_target(5)),
    loss("sum-plus-one", lambda x, t: (x * t).sum() + 1.0, with_target(5)),
    loss("logsumexp", lambda x, t: (torch.logsumexp(x, (0, 1)) - (x * t).mean()), with_target(5)),
    loss("max-of-batch", lambda x, t: (x * t).max() + (x * t).amin() + x.norm() + x.norm(1), with_target(5)),
]  # fmt: skip

PAIRS = [
    loss("cosine-embedding", lambda x, y, t: F.cosine_embedding_loss(x, y, t),
         lambda n: (torch.randn(n, 4), torch.randn(n, 5), signs(n))),
    loss("margin-ranking", lambda x, y, t: F.margin_ranking_loss(x[:, 0], y[:, 0], t, margin=0.3),
         lambda n: (torch.randn(n, 4), torch.randn(n, 5), signs(n))),
    loss("triplet", lambda x, y, z: F.triplet_margin_loss(x, y, z),
         lambda n: (torch.randn(n, 4), torch.randn(n, 5), torch.randn(n, 5))),
    loss("triplet-swap-distance", lambda x, y, z: F.triplet_margin_with_distance_loss(
        x, y, z, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), swap=True),
         lambda n: (torch.randn(n, 4), torch.randn(n, 5), torch.randn(n, 5))),
    loss("pairwise-distance", lambda x, y: F.pairwise_distance(x, y, p=3), with_target(5)),
    loss("clip", clip_loss, with_target(5), sizes=(8, 7, 2), gathers=True),
    loss("simclr", simclr, tensor(4), gathers=True),
    loss("triplet-batch-hard", batch_hard, classes, gathers=True),
    loss("cdist", lambda x, y: torch.cdist(x, y), with_target(5), gathers=True),
    loss("cdist-codes", lambda x: torch.cdist(x, torch.eye(5)).min(-1).values, tensor(4)),
    loss("cdist-p1", lambda x: torch.cdist(x, torch.eye(5), p=1), tensor(4)),
    loss("pdist", lambda x: F.pdist(x).mean(), tensor(4), gathers=True,
         falls_back=frozenset({"aten._pdist_forward.default", "aten._pdist_backward.default"})),
    loss("barlow-twins", lambda x, y: (((x - x.mean(0)) / x.std(0)).t() @ ((y - y.mean(0)) / y.std(0))
                                       / x.shape[0] - torch.eye(5)).square().sum(), with_target(5), tol=1e-9),
    loss("covariance", lambda x: torch.cov(x.t()).square().sum(), tensor(4)),
    loss("correlation", lambda x: torch.corrcoef(x.t()), tensor(4), sizes=(7,)),
]  # fmt: skip


@parametrise(CLASSIFICATION)
def test_classification_losses_are_global(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(REGRESSION)
def test_regression_losses_are_global(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(PAIRS)
def test_losses_over_pairs_see_the_whole_batch(construct: Construct, size: int) -> None:
    run(construct, size)
