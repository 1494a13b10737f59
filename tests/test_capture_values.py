"""Numbers, results, arguments, parameters, draws and sizes through the captured graph."""

import contextlib
import dataclasses
import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from capture_cases import batches, check, linear, squares, train
from replay import Replay, compare, maker
from torch import nn

torch.set_num_threads(1)


# -- Python numbers --------------------------------------------------------------------------


def test_a_python_counter_is_counted_once_per_call():
    def loss_of(model, x):
        model.calls = getattr(model, "calls", 0) + 1
        return squares(model, x) * model.calls

    check(linear(), train(loss_of), batches(6), most_captures=4)
    torch.manual_seed(0)
    model, optimizer = linear()()
    replay = Replay(train(loss_of), reuse=True)
    for x in batches(6):
        replay(model, optimizer, *x)
    assert model.calls == 6
    assert type(model.calls) is int


def test_a_branch_on_a_counter_changes_the_graph():
    def loss_of(model, x):
        model.calls = getattr(model, "calls", 0) + 1
        return squares(model, x) * (2 if model.calls % 4 == 0 else 1)

    check(linear(), train(loss_of), batches(9), most_captures=9)


@pytest.mark.parametrize("kind", ["ratio", "cosine", "constant", "scheduler", "betas"])
def test_schedules(kind):
    @maker
    def step_of(model, optimizer, scheduler):
        def step(model, optimizer, x):
            loss = train(squares)(model, optimizer, x)
            group = optimizer.param_groups[0]
            if kind == "ratio":
                group["lr"] *= 0.9
            elif kind == "cosine":
                group["n"] = group.get("n", 0) + 1
                group["lr"] = 0.05 * (1 + math.cos(math.pi * min(1.0, group["n"] / 10)))
            elif kind == "constant":
                group["lr"] = 0.03
            elif kind == "betas":
                group["betas"] = (group["betas"][0] * 0.99, 0.99)
            else:
                scheduler.step()
            return loss

        return step

    def build():
        model, optimizer = linear(torch.optim.Adam)()
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    check(build, step_of, batches(5), most_captures=5)


def test_item_in_arithmetic_and_in_the_result():
    def loss_of(model, x):
        loss = squares(model, x)
        scale = 1.0 / (loss.item() + 1.0)
        count = (x > 0).sum().item()
        return loss * scale / count

    def step(model, optimizer, x):
        loss = train(loss_of)(model, optimizer, x)
        return loss, loss.item(), (x > 0).sum().item(), {"n": x.shape[0], "name": "run", "no": None}

    check(linear(), step)


# -- results and arguments -----------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    extra: dict
    name: str = "x"
    nothing: object = None


def test_results_of_every_kind():
    def step(model, optimizer, x):
        loss = train(squares)(model, optimizer, x)
        y = model(x)
        return {
            "pair": Pair(loss, [y, (y.sum(), 3)]),
            "output": Output(loss * 2, {"y": y + 1}),
            "same": x,
            "parameter": model[0].weight,
            1: None,
        }

    def plain(result):
        if isinstance(result, dict) and "output" in result:
            assert type(result["output"]) is Output
            assert result["output"].nothing is None
            tensors = [
                result["output"].loss,
                result["output"].extra,
                result["parameter"],
                result["same"],
            ]
            return [v.detach() for v in torch.utils._pytree.tree_leaves([result["pair"], tensors])
                    if isinstance(v, torch.Tensor)]  # fmt: skip
        return result

    for reuse in (False, True):
        found, _ = compare(linear(), step, batches(), reuse, wrap=plain)
        assert not found


def test_arguments_of_every_kind():
    def step(model, optimizer, batch, pair, *, scale, flag, mask=None):
        optimizer.zero_grad()
        loss = (
            squares(model, batch["x"]["deep"][0]) * scale
            + pair.first.sum()
            + batch["holder"].loss.sum()
        )
        if flag == "on":
            loss = loss + model(pair.second).sum()
        if mask is not None:
            loss = loss * mask.sum()
        loss.backward()
        optimizer.step()
        return loss

    def outer(model, optimizer, x):
        holder = Output(x * 3, {})
        return {"x": {"deep": [x]}, "holder": holder}, Pair(x + 1, x * 2)

    torch.manual_seed(0)
    ours, theirs = linear()(), None
    torch.manual_seed(0)
    theirs = linear()()
    replay = Replay(step, reuse=True)
    for number, (x,) in enumerate(batches(6)):
        kwargs = {"scale": 2.0 if number < 5 else 3.0, "flag": "on", "mask": torch.ones(2) * number}
        expected = step(*theirs, *outer(*theirs, x), **kwargs)
        actual = replay(*ours, *outer(*ours, x), **kwargs)
        assert torch.equal(actual, expected), number


def test_arguments_changed_in_place():
    def step(model, optimizer, x):
        x.add_(1)
        return train(squares)(model, optimizer, x)

    for reuse in (False, True):
        x = torch.zeros(2, 4)
        replay = Replay(step, reuse)
        model, optimizer = linear()()
        for _ in range(4):
            replay(model, optimizer, x)
        assert torch.equal(x, torch.full((2, 4), 4.0))


# -- parameters ---------------------------------------------------------------------------


def test_freezing_a_layer_inside_the_step():
    def step(model, optimizer, x):
        model.calls = getattr(model, "calls", 0) + 1
        if model.calls == 2:
            model[0].weight.requires_grad_(False)
        return train(squares)(model, optimizer, x)

    check(linear(), step, batches(6), most_captures=6)


def test_frozen_tied_unused_and_foreign_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.b.bias.requires_grad_(False)
            self.scalar = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.b(self.a(x).tanh()) * self.scalar

    def build():
        model = Tied()
        other = nn.Parameter(torch.ones(3))
        groups = [
            {"params": [model.a.weight], "lr": 0.1},
            {"params": [model.scalar, other, model.b.bias]},
        ]
        return model, torch.optim.Adam(groups, lr=0.01)

    check(build, train(squares))


def test_attributes_of_parameters():
    def build():
        model, _ = linear()()
        model[0].weight.scale = 0.5
        return model, Scaled(model.parameters(), {})

    class Scaled(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1 * getattr(p, "scale", 1.0))

    check(build, train(squares))


def test_model_converted_to_float64():
    def build():
        model, _ = linear()()
        model.double()
        return model, torch.optim.AdamW(model.parameters())

    check(build, train(squares), [(x.double(),) for (x,) in batches()])


# -- random numbers and sizes ---------------------------------------------------------------------


def test_every_random_draw_is_eager_s():
    def loss_of(model, x):
        noise = torch.randn_like(x) + torch.rand(4) + torch.normal(0.0, 1.0, (4,))
        order = torch.randperm(x.shape[0])
        keep = torch.bernoulli(torch.full_like(x, 0.5))
        pick = torch.multinomial(torch.ones(3), 2)
        y = model(F.dropout(x * keep + noise, 0.3)[order])
        return (
            y.square().sum()
            + F.gumbel_softmax(y).sum()
            + y[:, pick].sum()
            + torch.randint(9, ()).item()
        )

    check(linear(), train(loss_of))


def test_sizes_from_data_are_guarded():
    def loss_of(model, x):
        y = model(x)
        mask = x[:, 0] > 0
        picked = y[mask]
        values, inverse, counts = torch.unique(
            (x * 2).round().long(), return_inverse=True, return_counts=True
        )
        again = torch.repeat_interleave(y, mask.long() + 1, dim=0)
        hot = F.one_hot((x[:, 0].abs() * 3).long())
        count = torch.bincount((x[:, 1].abs() * 3).long())
        where = mask.nonzero().squeeze(1)
        return (
            picked.sum() / max(picked.shape[0], 1) + values.sum() * 0.1 + counts.max() + again.sum()
            + inverse.float().mean() + hot.shape[1] + count.float().var() + where.sum()
            + torch.masked_select(y, y > 0).sum() + y[y > 0.5].numel()
        )  # fmt: skip

    check(linear(), train(loss_of), batches(6), most_captures=7)


def test_sizes_of_an_earlier_call_return():
    def loss_of(model, x):
        picked = model(x)[x[:, 0] > 0]
        return picked.sum() / picked.shape[0]

    x = torch.tensor([[1.0, 2, 3, 4], [-1, 2, 3, 4], [1, 0, 0, 0]])
    given = [(x,), (x,), (-x,), (x,), (x,), (-x,)]
    check(linear(), train(loss_of), given, most_captures=6)


def test_a_batch_of_another_size_is_another_program():
    given = [(torch.randn(n, 4),) for n in (3, 3, 5, 5, 3, 5)]
    check(linear(), train(squares), given, most_captures=6)


def test_a_default_device_and_dtype_context():
    def loss_of(model, x):
        with torch.device("cpu"), contextlib.nullcontext():
            bias = torch.ones(3)
        return (model(x) + bias).square().sum()

    check(linear(), train(loss_of))
