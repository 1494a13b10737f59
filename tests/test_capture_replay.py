"""Steps run through their captured graph leave on one device exactly what eager leaves."""

import copy

import torch
from capture_cases import batches, check, linear, squares, train
from replay import Replay, compare, maker
from torch import nn
from torch.nn.utils import parametrizations

torch.set_num_threads(1)


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
