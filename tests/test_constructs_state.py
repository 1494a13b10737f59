"""Parameters in their forms, buffers, averaging, inputs and outputs under all four modes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from constructs import Body, Construct, parameter, parametrise, run, score, sgd, tensor, train
from lockstep_check import check
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    return model


def trained(parameters: Any) -> torch.optim.Optimizer:
    return sgd(p for p in parameters if p.requires_grad)


def count_and_average(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    m.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    m.seen.copy_(torch.maximum(m.seen, x.detach().amax(0)))
    return m.a(x - m.mean) * m.steps


def queue(m: Any, x: Tensor) -> Tensor:
    """MoCo: keys of the batch replace the oldest, at a pointer held in a buffer."""
    keys = F.normalize(m.a(x), dim=1)
    logits = keys @ m.queue.clone().detach().t()
    position = (m.pointer + torch.arange(x.shape[0])) % m.queue.shape[0]
    m.queue.index_copy_(0, position, keys.detach())
    m.pointer.add_(x.shape[0])
    return logits


def vector_quantiser(m: Any, x: Tensor) -> Tensor:
    """Exponential averages of the codes' counts and sums over the whole batch."""
    z = m.a(x)
    one_hot = F.one_hot(torch.cdist(z.detach(), m.codes).argmin(-1), 5).to(z.dtype)
    m.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
    m.sums.mul_(0.9).add_(one_hot.t() @ z.detach(), alpha=0.1)
    m.codes.copy_(m.sums / m.counts.clamp(min=1e-3)[:, None])
    code = one_hot @ m.codes
    return z + (code - z).detach()


def reassigned(m: Any, x: Tensor) -> Tensor:
    m.memory = 0.5 * m.memory + x.detach().sum(0)
    return m.a(x) + m.memory.sum()


def parameter_list(m: Any, x: Tensor) -> Tensor:
    for weight, bias in zip(m.weights, m.table.values(), strict=True):
        x = (x @ weight + bias).tanh()
    return x


def views(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.fused.view(3, 4, 5).unbind(0)
    return x @ q + (x @ k) * (x @ v) + m.flat[2:7] * m.flat.as_strided((5,), (1,), 1)


def experts(m: Any, x: Tensor) -> Tensor:
    return torch.stack([layer(x) for layer in m.layers], 1) * m.gate


def small(m: Any, x: Tensor) -> Tensor:
    return m.scale * (m.a(x) + m.short.repeat(2)) + m.one * m.empty.sum()


def averaged(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """Stochastic weight averaging inside the step."""
    optimizer.zero_grad()
    loss = score(model.online(x))
    loss.backward()
    optimizer.step()
    model.average.update_parameters(model.online)
    return loss


def with_average(**options: Any) -> Any:
    def make() -> nn.Module:
        online = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        return Body(
            lambda m, x: m.online(x), online=online, average=AveragedModel(online, **options)
        )

    return make


def online_only(parameters: Any) -> torch.optim.Optimizer:
    return sgd(list(parameters)[:6])


def momentum_teacher(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """BYOL: a teacher that follows the student by hand."""
    optimizer.zero_grad()
    with torch.no_grad():
        target = model.average(x)
    loss = F.mse_loss(model.online(x), target) + score(model.online(x))
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(model.average.parameters(), model.online.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    return loss


def with_teacher() -> nn.Module:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    return Body(lambda m, x: m.online(x), online=net(), average=net().requires_grad_(False))


def student_only(parameters: Any) -> torch.optim.Optimizer:
    return sgd(list(parameters)[:4])


PARAMETERS = [
    Construct("tied", tied, tensor(4), sizes=(8, 7, 2)),
    Construct("frozen", frozen, tensor(4), optimizer=trained),
    Construct("frozen-in-optimizer", frozen, tensor(4), sizes=(7,)),
    Construct("used-twice", lambda: Body(lambda m, x: m.a(m.a(x).sin()), a=nn.Linear(4, 4)), tensor(4)),
    Construct("unused", lambda: Body(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Linear(5, 6)),
              tensor(4)),
    Construct("small-parameters", lambda: Body(
        small, a=nn.Linear(4, 6), scale=nn.Parameter(torch.tensor(1.5)), short=parameter(3),
        one=parameter(1), empty=nn.Parameter(torch.empty(0, 3))), tensor(4), sizes=(8, 7, 2)),
    Construct("lists", lambda: Body(
        parameter_list, weights=nn.ParameterList([parameter(4, 5), parameter(5, 3)]),
        table=nn.ParameterDict({"a": parameter(5), "b": parameter(3)})), tensor(4)),
    Construct("views", lambda: Body(views, fused=parameter(12, 5), flat=parameter(9)), tensor(4),
              gathers=True),
    Construct("module-list", lambda: Body(
        experts, layers=nn.ModuleList([nn.Linear(4, 3) for _ in range(3)]), gate=parameter(3, 1)),
        tensor(4)),
    Construct("no-parameters-in-graph", lambda: Body(lambda m, x: m.a(x) * m.c + m.d, a=nn.Linear(4, 3),
              c=torch.arange(3.0), d=torch.tensor(0.5)), tensor(4), sizes=(7,)),
    Construct("odd-sizes", lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)), tensor(4)),
    Construct("all-dims-equal-batch", lambda: nn.Sequential(
        nn.Linear(7, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 7)), tensor(7, 7), sizes=(7,)),
]  # fmt: skip

BUFFERS = [
    Construct("counter-and-average", lambda: Body(
        count_and_average, a=nn.Linear(4, 3), steps=torch.tensor(0), mean=torch.zeros(4),
        seen=torch.full((4,), -9.0)), tensor(4), sizes=(8, 7, 2)),
    Construct("queue", lambda: Body(
        queue, a=nn.Linear(4, 3), queue=F.normalize(torch.randn(10, 3), dim=1), pointer=torch.tensor(7)),
        tensor(4), gathers=True),
    Construct("vector-quantiser", lambda: Body(
        vector_quantiser, a=nn.Linear(4, 3), codes=torch.randn(5, 3), counts=torch.ones(5),
        sums=torch.randn(5, 3)), tensor(4)),
    Construct("reassigned", lambda: Body(reassigned, a=nn.Linear(4, 3), memory=torch.zeros(4)), tensor(4)),
    Construct("averaged", with_average(), tensor(4), averaged, online_only),
    Construct("averaged-exponential", with_average(multi_avg_fn=get_ema_multi_avg_fn(0.9)), tensor(4),
              averaged, online_only),
    Construct("averaged-buffers", with_average(use_buffers=True), tensor(4), averaged, online_only,
              sizes=(7,)),
    Construct("momentum-teacher", with_teacher, tensor(4), momentum_teacher, student_only),
]  # fmt: skip


@dataclass
class Output:
    """What a model of the field returns."""

    logits: Tensor
    hidden: Tensor | None = None
    name: str = "output"


pytree.register_dataclass(Output, field_names=["logits", "hidden"], drop_field_names=["name"])
Pair = namedtuple("Pair", ["first", "second"])


def mapping(m: Any, x: dict[str, Any]) -> dict[str, Any]:
    y = m.a(x["tokens"]["values"]) * x["mask"][:, None]
    return {"y": y, "nested": [y.sin(), {"count": 3, "none": None}]}


def several(m: Any, x: Tensor, pairs: list[Any], *, scale: Tensor, flag: bool, power: int) -> Any:
    y = m.a(x) + pairs[0][0] * pairs[1]
    return Pair(y**power * scale if flag else y, y.mean())


INPUTS = [
    Construct("nested-inputs", lambda: Body(mapping, a=nn.Linear(4, 3)), lambda n: (
        {"tokens": {"values": torch.randn(n, 4)}, "mask": torch.rand(n)},)),
    Construct("dataclass-output", lambda: Body(
        lambda m, x: Output(m.a(x), m.a(x).sin()), a=nn.Linear(4, 3)), tensor(4)),
    Construct("named-tuple-and-scalars", lambda: Body(
        lambda m, x: Pair(m.a(x), {"n": x.shape[0], "mean": m.a(x).mean()}), a=nn.Linear(4, 3)), tensor(4)),
    Construct("integer-and-boolean-inputs", lambda: Body(
        lambda m, x, i, b: m.a(x) * b[:, None] + i[:, None], a=nn.Linear(4, 3)),
        lambda n: (torch.randn(n, 4), torch.arange(n), torch.rand(n) < 0.5)),
    Construct("no-batch-input", lambda: Body(
        lambda m, x, w: m.a(x) * w, a=nn.Linear(4, 3)), lambda n: (torch.randn(n, 4), torch.randn(3))),
    Construct("scalar-input", lambda: Body(
        lambda m, x, w: m.a(x) * w, a=nn.Linear(4, 3)), lambda n: (torch.randn(n, 4), torch.tensor(0.3))),
    Construct("batch-on-another-dim", lambda: Body(
        lambda m, x, y: m.a(x.transpose(0, 1)) + y, a=nn.Linear(4, 3)),
        lambda n: (torch.randn(4, n).t().contiguous().t().unsqueeze(0).expand(2, -1, -1)[0].unsqueeze(0)
                   .expand(3, -1, -1).permute(0, 2, 1).contiguous(), torch.randn(n, 3, 3)), gathers=True),
    Construct("transposed-strides", lambda: Body(lambda m, x: m.a(x), a=nn.Linear(4, 3)),
              lambda n: (torch.randn(4, n).t(),)),
    Construct("aliased-outputs", lambda: Body(
        lambda m, x: (lambda y: (y, y, y.view(-1), y.t()))(m.a(x)), a=nn.Linear(4, 3)), tensor(4)),
    Construct("input-returned", lambda: Body(lambda m, x: (m.a(x), x, x[:, :2]), a=nn.Linear(4, 3)),
              tensor(4)),
    Construct("input-written", lambda: Body(lambda m, x: m.a(x.mul_(2)), a=nn.Linear(4, 3)), tensor(4)),
]  # fmt: skip


@parametrise(PARAMETERS)
def test_parameters_in_every_form_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(BUFFERS)
def test_buffers_and_averages_are_global(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(INPUTS)
def test_inputs_and_outputs_of_every_shape(construct: Construct, size: int) -> None:
    run(construct, size)


@pytest.mark.parametrize("size", [7, 2])
def test_keyword_arguments_and_flags(size: int) -> None:
    named = {"scale": torch.rand(size, 1), "flag": True, "power": 2}
    batch = (torch.randn(size, 4), [(torch.randn(size, 1),), torch.randn(size, 3)])

    def step(model: nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return train(model, optimizer, *args, **kwargs)

    check(lambda: Body(several, a=nn.Linear(4, 3)), sgd, step, batch, kwargs=named)
