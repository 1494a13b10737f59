"""Custom functions, checkpoints, double backward, clipping, accumulation and linear algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parameter, parametrise, run, score, tensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Reversed(torch.autograd.Function):
    """Reverses the gradient, scaled by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))


def after(function: Any, outputs: int = 6) -> Any:
    return lambda: Body(lambda m, x, *more: function(m.a(x), *more), a=nn.Linear(4, outputs))


def checkpointed(reentrant: bool) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.b, m.a(x), use_reentrant=reentrant)

    return lambda: Body(
        forward, a=nn.Linear(4, 6), b=nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))
    )


def penalty(model: nn.Module, optimizer: Any, x: Tensor) -> dict[str, Any]:
    """WGAN-style: the norm of the gradient with respect to the input."""
    optimizer.zero_grad()
    x = x.clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = score(out) + ((slope.norm(dim=1) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "slope": slope}


def weight_penalty(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """Second derivatives through the parameters' own gradient."""
    optimizer.zero_grad()
    loss = score(model(x))
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + sum(s.square().sum() for s in slopes)
    total.backward()
    optimizer.step()
    return total


def inner_loop(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """MAML: one inner step, differentiated through."""
    optimizer.zero_grad()
    weights = dict(model.named_parameters())
    inner = score(torch.func.functional_call(model, weights, (x,)))
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {k: w - 0.1 * s for (k, w), s in zip(weights.items(), slopes, strict=True)}
    loss = score(torch.func.functional_call(model, adapted, (x.flip(-1),)))
    loss.backward()
    optimizer.step()
    return loss


def clipped(clip: Any) -> Any:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = 10 * score(model(x))
        loss.backward()
        norm = clip(model.parameters())
        optimizer.step()
        return {"loss": loss, "norm": norm}

    return step


def by_norm(order: float, limit: float = 0.5, **options: Any) -> Any:
    return clipped(lambda p: nn.utils.clip_grad_norm_(p, limit, norm_type=order, **options))


def accumulated(parts: int) -> Any:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        total: Any = 0.0
        for part in x.chunk(parts):
            loss = score(model(part)) * part.shape[0] / x.shape[0]
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def by_grad_argument(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(x)
    out.backward(torch.cos(out).detach())
    optimizer.step()
    return out


def hooked(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    hidden = model[0](x)
    handle = hidden.register_hook(lambda grad: grad * 2)
    loss = score(model[1:](hidden))
    loss.backward()
    handle.remove()
    optimizer.step()
    return loss


def two_losses(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(x)
    score(out[:, :3]).backward(retain_graph=True)
    score(out[:, 3:]).backward()
    optimizer.step()
    return out


def scaled_by_hand(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """Gradients edited in place, as loss scalers and noise do."""
    optimizer.zero_grad()
    loss = score(model(x)) * 8
    loss.backward()
    for p in model.parameters():
        p.grad.div_(8).add_(torch.randn_like(p) * 0.01)
    optimizer.step()
    return loss


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).mul_(2).add_(1).relu_() + 0
    y += y.detach().mean()
    z = torch.zeros_like(y)
    z[:, :3] = y[:, 3:]
    z.add_(y).clamp_(max=3.0)
    z.unsqueeze_(1).squeeze_(1)
    z.t_().t_()
    return z.transpose(0, 1).mul_(1.5).transpose(0, 1)


def square(m: Any, x: Tensor) -> Tensor:
    """[batch, 3, 3], well conditioned and symmetric."""
    y = m.a(x).view(-1, 3, 3) * 0.3
    return y @ y.transpose(1, 2) + torch.eye(3) * torch.arange(1.0, 4.0)


def matrices(name: str, function: Any, sizes: Any = (7,), **options: Any) -> Construct:
    return Construct(name, lambda: Body(lambda m, x: function(square(m, x)), a=nn.Linear(4, 9)),
                     tensor(4), sizes=sizes, tol=1e-10, **options)  # fmt: skip


AUTOGRAD = [
    Construct("straight-through", after(StraightThrough.apply), tensor(4), sizes=(8, 7, 2)),
    Construct("reversed", after(lambda x: Reversed.apply(x, 0.5).sin()), tensor(4)),
    Construct("checkpoint", checkpointed(False), tensor(4), sizes=(8, 7, 2)),
    Construct("checkpoint-reentrant", checkpointed(True), tensor(4)),
    Construct("gradient-penalty", two, tensor(4), penalty, sizes=(8, 7, 2)),
    Construct("weight-penalty", two, tensor(4), weight_penalty),
    Construct("inner-loop", two, tensor(4), inner_loop, gathers=True),
    Construct("penalty-conv", lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Softplus(), nn.Flatten(), nn.Linear(12, 2)), tensor(2, 3, 3), penalty,
        sizes=(7,)),
    Construct("detach-and-no-grad", after(lambda x: x * x.detach().sin() + torch.no_grad()(torch.cos)(x)),
              tensor(4)),
    Construct("by-grad-argument", two, tensor(4), by_grad_argument),
    Construct("hooked", two, tensor(4), hooked),
    Construct("two-losses", two, tensor(4), two_losses),
    Construct("in-place", lambda: Body(in_place, a=nn.Linear(4, 6)), tensor(4), sizes=(8, 7, 2)),
]  # fmt: skip


def seeded(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """The state is read, the generator seeded, and put back."""
    optimizer.zero_grad()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    out = F.dropout(model(x), 0.4)
    torch.set_rng_state(state)
    loss = score(F.dropout(out, 0.2))
    loss.backward()
    optimizer.step()
    return loss


AUTOGRAD.append(Construct("seeded", two, tensor(4), seeded))

UPDATES = [
    Construct("clip-norm", two, tensor(4), by_norm(2.0), sizes=(8, 7, 2)),
    Construct("clip-norm-loose", two, tensor(4), by_norm(2.0, 1e6), sizes=(7,)),
    Construct("clip-norm-1", two, tensor(4), by_norm(1.0)),
    Construct("clip-norm-3", two, tensor(4), by_norm(3.0), sizes=(7,)),
    Construct("clip-norm-inf", two, tensor(4), by_norm(float("inf"))),
    Construct("clip-norm-one-by-one", two, tensor(4), by_norm(2.0, foreach=False), sizes=(7,)),
    Construct("clip-value", two, tensor(4), clipped(lambda p: nn.utils.clip_grad_value_(p, 0.05))),
    Construct("clip-adam", two, tensor(4), by_norm(2.0), torch.optim.Adam, sizes=(7,)),
    Construct("accumulated", two, tensor(4), accumulated(4), sizes=(8, 7, 2), gathers=True),
    Construct("accumulated-two", two, tensor(4), accumulated(2), gathers=True),
    Construct("gradients-by-hand", two, tensor(4), scaled_by_hand),
]

COMPLEX = [
    Construct("complex-weights", lambda: Body(
        lambda m, x: (x.to(torch.complex128) @ m.w + m.b).abs(),
        w=nn.Parameter(torch.randn(4, 3, dtype=torch.complex128)),
        b=nn.Parameter(torch.randn(3, dtype=torch.complex128))), tensor(4), sizes=(8, 7, 2)),
    Construct("complex-output", lambda: Body(
        lambda m, x: torch.complex(m.a(x), m.b(x)) * m.w, a=nn.Linear(4, 3), b=nn.Linear(4, 3),
        w=nn.Parameter(torch.randn(3, dtype=torch.complex128))), tensor(4)),
    Construct("complex-layer", lambda: Body(
        lambda m, x: torch.view_as_real(m.a(torch.view_as_complex(x))),
        a=nn.Linear(4, 3, dtype=torch.complex128)), tensor(4, 2)),
    Construct("polar-angle", after(lambda x: torch.polar(x[:, :3].exp(), x[:, 3:]).angle()), tensor(4),
              sizes=(7,)),
    Construct("real-parameter-as-complex", lambda: Body(
        lambda m, x: (x * torch.view_as_complex(m.w)).real, w=parameter(4, 2)), tensor(4)),
]  # fmt: skip

MATRICES = [
    matrices("inverse", torch.linalg.inv, sizes=(8, 7, 2)),
    matrices("solve", lambda a: torch.linalg.solve(a, a.sin()[..., :1]), sizes=(7, 2)),
    matrices("solve-shared", lambda a: torch.linalg.solve(a, torch.ones(3))),
    matrices("solve-shared-matrix", lambda a: torch.linalg.solve(a, torch.arange(15.0).view(3, 5))),
    matrices("solve-square-of-batch", lambda a: torch.linalg.solve(a, torch.eye(3)), sizes=(8,),
             falls_back=frozenset({"aten._linalg_solve_ex.default"})),
    matrices("triangular", lambda a: torch.linalg.solve_triangular(a.tril(), a.cos(), upper=False)),
    matrices("cholesky", torch.linalg.cholesky, sizes=(7, 2)),
    matrices("cholesky-solve", lambda a: torch.cholesky_solve(a.sin(), torch.linalg.cholesky(a))),
    matrices("qr", lambda a: torch.linalg.qr(a)[1]),
    matrices("svd-values", torch.linalg.svdvals, sizes=(7, 2)),
    matrices("svd", lambda a: [x.abs() for x in torch.linalg.svd(a, full_matrices=False)]),
    matrices("eigh", lambda a: [x.abs() for x in torch.linalg.eigh(a)]),
    matrices("determinants", lambda a: (torch.linalg.det(a), torch.logdet(a), torch.slogdet(a)[1])),
    matrices("matrix-exp", lambda a: torch.linalg.matrix_exp(a * 0.1)),
    matrices("matrix-power", lambda a: torch.linalg.matrix_power(a * 0.3, 3)),
    matrices("pinv", torch.linalg.pinv),
    matrices("norms", lambda a: (torch.linalg.matrix_norm(a), torch.linalg.norm(a, dim=(1, 2)),
                                 torch.linalg.matrix_norm(a, 2), torch.linalg.vector_norm(a, 3, (1, 2)))),
    matrices("trace-cross", lambda a: (torch.linalg.cross(a, a.sin()), a.diagonal(dim1=1, dim2=2).sum(-1))),
    Construct("whitening", after(lambda x: (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(
        x.t() @ x / x.shape[0] + torch.eye(6))).t()), tensor(4), tol=1e-10),
    Construct("inverse-of-weight", lambda: Body(
        lambda m, x: x @ torch.linalg.inv(m.w + 3 * torch.eye(4)) + torch.linalg.slogdet(m.w).logabsdet,
        w=parameter(4, 4)), tensor(4)),
]  # fmt: skip


@parametrise(AUTOGRAD)
def test_autograd_constructs_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(UPDATES)
def test_clipping_and_accumulation_are_global(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(COMPLEX + MATRICES)
def test_complex_numbers_and_matrices_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)
