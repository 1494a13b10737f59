"""Steps run through their captured graph leave on one device exactly what eager leaves."""

import contextlib
import copy
import dataclasses
import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from replay import Replay, compare, maker
from torch import nn
from torch.nn.utils import parametrizations

torch.set_num_threads(1)


def batches(count=4, rows=6, width=4):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, width, generator=generator),) for _ in range(count)]


def check(build, step, given=None, most_captures=3):
    """Compare with fresh captures and with reuse; bitwise, generator included."""
    given = batches() if given is None else given
    for reuse in (False, True):
        found, replay = compare(build, step, given, reuse)
        assert not found, found
    assert replay.captures <= most_captures, replay.captures


def linear(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
    def build():
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return model, optimizer(model.parameters())

    return build


def train(loss_of):
    """Return the ordinary step around a loss."""

    def step(model, optimizer, *batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def squares(model, x):
    return model(x).square().sum()


def double_gradient(parameter):
    parameter.grad.mul_(2)


# -- gradients ---------------------------------------------------------------------------


def test_gradients_accumulate_across_calls():
    def step(model, optimizer, x):
        loss = squares(model, x)
        loss.backward()
        return loss

    check(linear(), step)


def test_gradients_are_zeroed_in_place():
    def step(model, optimizer, x):
        optimizer.zero_grad(set_to_none=False)
        squares(model, x).backward()
        optimizer.step()

    check(linear(), step)


def test_gradients_are_cleared_after_the_update():
    def step(model, optimizer, x):
        squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(linear(), step)


def test_accumulation_inside_the_step():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        for part in x.chunk(3):
            (squares(model, part) / 3).backward()
        optimizer.step()
        return {"grads": [p.grad for p in model.parameters()]}

    check(linear(), step)


def test_clipping_by_norm_and_by_value():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        squares(model, x).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        return norm

    check(linear(), step)


def test_hooks_on_parameters_tensors_and_modules():
    def build():
        model, optimizer = linear()()
        model[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        model[0].bias.register_post_accumulate_grad_hook(double_gradient)
        model[0].register_forward_hook(lambda m, args, out: out * 2)
        model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        return model, optimizer

    def loss_of(model, x):
        y = model(x)
        y.register_hook(lambda g: g.sign())
        return y.square().sum()

    check(build, train(loss_of))


def test_gradient_of_gradient():
    def loss_of(model, x):
        x = x.clone().requires_grad_()
        y = model(x).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    check(linear(), train(loss_of))


def test_two_backwards_through_one_graph():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        hidden = model[0](x)
        hidden.sum().backward(retain_graph=True)
        model[2](hidden.tanh()).sum().backward()
        optimizer.step()

    check(linear(), step)


def test_gradients_by_autograd_grad_assigned_by_hand():
    def step(model, optimizer, x):
        loss = squares(model, x)
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g * 0.5
        optimizer.step()
        return loss

    check(linear(), step)


def test_no_grad_detach_and_checkpoint():
    from torch.utils.checkpoint import checkpoint

    def loss_of(model, x):
        with torch.no_grad():
            target = model(x) * 2
        y = checkpoint(model, x, use_reentrant=False)
        return (y - target.detach()).square().sum() + checkpoint(
            model, x.clone().requires_grad_(), use_reentrant=True
        ).sum()

    check(linear(), train(loss_of))


def test_autocast_region():
    def loss_of(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return y.float().square().sum()

    check(linear(), train(loss_of))


# -- buffers and attributes --------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer("inplace", torch.zeros(3))
        self.register_buffer("reassigned", torch.zeros(3))
        self.register_buffer("both", torch.zeros(3))
        self.register_buffer("later", None)
        self.register_buffer("count", torch.tensor(0))
        self.cache = None
        self.history = {}

    def forward(self, x):
        y = self.lin(x)
        mean = y.detach().mean(0)
        self.inplace.mul_(0.9).add_(mean, alpha=0.1)
        self.reassigned = 0.9 * self.reassigned + 0.1 * mean
        self.both.mul_(0.5)
        self.both = self.both + mean
        self.later = mean if self.later is None else self.later + mean
        self.count += 1
        self.count.data.add_(1)
        if self.cache is None:
            self.cache = torch.arange(3.0)
        self.last = y.detach() * 2
        self.history["mean"] = mean
        self.history.setdefault("sum", torch.zeros(3)).add_(mean)
        return y + self.inplace + self.cache + self.history["sum"]


def buffers():
    model = Buffers()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_buffers_and_attributes():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        return [loss, model.last, dict(model.history), model.cache]

    check(buffers, step, most_captures=4)
    model, optimizer = buffers()
    replay = Replay(step)
    for x in batches():
        replay(model, optimizer, *x)
    assert all(isinstance(v, torch.Tensor) and type(v) is torch.Tensor
               for v in [model.last, *model.history.values(), model.cache])  # fmt: skip


def test_new_buffer_and_new_attribute_registered_in_the_step():
    def loss_of(model, x):
        if not hasattr(model, "seen"):
            model.register_buffer("seen", torch.zeros(3))
        model.seen += 1
        return model(x).sum() + model.seen.sum()

    check(linear(), train(loss_of))


def test_batch_norm_and_spectral_norm_and_weight_norm():
    def build():
        model = nn.Sequential(
            nn.BatchNorm1d(4),
            parametrizations.weight_norm(nn.Linear(4, 5)),
            parametrizations.spectral_norm(nn.Linear(5, 6)),
            parametrizations.orthogonal(nn.Linear(6, 3), orthogonal_map="cayley"),
            nn.utils.spectral_norm(nn.Linear(3, 3)),
        )
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    found, _ = compare(build, train(squares), batches())
    numbers = [v for step in found.values() for k, v in step.items() if not isinstance(v, int)]
    assert not numbers, found


def test_eval_mode_and_switching_modes():
    def loss_of(model, x):
        model.eval()
        with torch.no_grad():
            target = model(x)
        model.train()
        return (model(x) - target).square().sum()

    def build():
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
        return model, torch.optim.Adam(model.parameters())

    check(build, train(loss_of))


# -- values held outside the arguments -------------------------------------------------------


@maker
def ema_step(model, optimizer, shadow, twin):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow["in place " + name].mul_(0.9).add_(p, alpha=0.1)
                shadow[name] = 0.9 * shadow[name] + 0.1 * p
            for a, b in zip(twin.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)
        return (
            loss,
            {k: v.clone() for k, v in shadow.items()},
            [p.clone() for p in twin.parameters()],
        )

    return step


def ema_build():
    model, optimizer = linear()()
    shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
    shadow |= {"in place " + n: p.detach().clone() for n, p in model.named_parameters()}
    return model, optimizer, shadow, copy.deepcopy(model)


def test_moving_averages_in_a_closure():
    check(ema_build, ema_step)


class Average:
    """What users write: an object with a dict of tensors and a counter."""

    def __init__(self, model):
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    def update(self, model):
        self.updates += 1
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        for n, p in model.named_parameters():
            self.shadow[n] = decay * self.shadow[n] + (1 - decay) * p.detach()


@maker
def average_step(model, optimizer, average):
    def step(model, optimizer, x):
        loss = train(squares)(model, optimizer, x)
        average.update(model)
        return loss, {k: v.clone() for k, v in average.shadow.items()}, average.updates

    return step


def test_moving_average_object_with_a_counter():
    def build():
        model, optimizer = linear()()
        return model, optimizer, Average(model)

    check(build, average_step)


def test_averaged_model_of_torch():
    @maker
    def step_of(model, optimizer, average):
        def step(model, optimizer, x):
            loss = train(squares)(model, optimizer, x)
            average.update_parameters(model)
            return (
                loss,
                [p.clone() for p in average.module.parameters()],
                average.n_averaged.clone(),
            )

        return step

    def build():
        model, optimizer = linear()()
        return model, optimizer, torch.optim.swa_utils.AveragedModel(model)

    check(build, step_of, most_captures=4)


def test_list_of_parameters_in_a_closure():
    @maker
    def step_of(model, optimizer, parameters):
        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = squares(model, x) + 0.1 * sum(p.square().sum() for p in parameters)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return loss

        return step

    def build():
        model, optimizer = linear()()
        return model, optimizer, list(model.parameters())

    check(build, step_of)


def test_losses_appended_to_a_list():
    @maker
    def step_of(model, optimizer, losses):
        def step(model, optimizer, x):
            loss = train(squares)(model, optimizer, x)
            losses.append(loss.detach())
            losses.append(loss.item())
            return len(losses), [float(v) for v in losses] if losses is None else None

        return step

    def build():
        return (*linear()(), [])

    ours, theirs = [], []
    for losses, wrap in ((ours, Replay), (theirs, lambda f: f)):
        torch.manual_seed(0)
        model, optimizer = linear()()
        step = wrap(step_of(model, optimizer, losses))
        for x in batches():
            step(model, optimizer, *x)
    assert [float(v) for v in ours] == [float(v) for v in theirs]
    assert [type(v) for v in ours] == [type(v) for v in theirs]


def test_frozen_teacher_in_a_closure():
    @maker
    def step_of(model, optimizer, teacher):
        def loss_of(model, x):
            with torch.no_grad():
                target = teacher(x)
            return (model(x) - target).square().sum() + (model(x) - teacher(x).detach()).sum()

        return train(loss_of)

    def build():
        return (*linear()(), linear()()[0])

    check(build, step_of)


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
