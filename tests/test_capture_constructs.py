"""Things users put into steps, through the captured graph: schedulers, scalers, transforms."""

import pytest
import torch
from capture_cases import batches, check, train
from replay import maker
from torch import nn
from torch.optim import lr_scheduler

torch.set_num_threads(1)


def build():
    model = nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters())


def total(model, x):
    return model(x).square().sum()


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers_stepped_inside_the_step(name):
    @maker
    def step_of(model, optimizer, scheduler):
        def step(model, optimizer, x):
            loss = train(total)(model, optimizer, x)
            scheduler.step()
            return loss, scheduler.last_epoch, scheduler.get_last_lr()[0]

        return step

    def with_scheduler():
        model, optimizer = build()
        return model, optimizer, SCHEDULERS[name](optimizer)

    check(with_scheduler, step_of, batches(6), most_captures=6)


def test_an_explicit_generator():
    @maker
    def step_of(model, optimizer, generator):
        def loss_of(model, x):
            return (model(x) + torch.rand(3, generator=generator)).square().sum()

        return train(loss_of)

    check(lambda: (*build(), torch.Generator().manual_seed(7)), step_of)


def test_a_gradient_scaler():
    @maker
    def step_of(model, optimizer, scaler):
        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = total(model, x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    check(lambda: (*build(), torch.amp.GradScaler("cpu", init_scale=8.0)), step_of)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x):
        z = self.lin(x)
        index = torch.cdist(z, self.codes).argmin(1)
        picked = self.codes[index]
        if self.training:
            with torch.no_grad():
                hot = nn.functional.one_hot(index, 5).float()
                self.counts.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.data.copy_(self.codes * 0.9 + 0.1 * (hot.T @ z))
        return z + (picked - z).detach() + (z - picked.detach()).square()


def test_a_codebook_written_through_data():
    def codebook():
        model = Codebook()
        return model, torch.optim.Adam(model.parameters())

    check(codebook, train(total))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0) * 0.5


def forked(model, x):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        noise = torch.randn(3)
    return (model(x) + noise + torch.randn(3)).sum()


def called_with_others(model, x):
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (x,)).sum()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x: Halved.apply(model(x)).sum(),
        forked,
        called_with_others,
        lambda model, x: torch.func.vmap(lambda row: model(row).square().sum())(x).sum(),
    ],
    ids=["function", "fork_rng", "functional_call", "vmap"],
)
def test_transforms(loss_of):
    check(build, train(loss_of))


def test_the_closure_form_of_step():
    def step(model, optimizer, x):
        def closure():
            optimizer.zero_grad()
            loss = total(model, x)
            loss.backward()
            return loss

        return optimizer.step(closure)

    check(build, step)


def test_loading_a_changed_state_dict():
    def step(model, optimizer, x):
        loss = train(total)(model, optimizer, x)
        state = model.state_dict()
        state["weight"].mul_(0.99)
        model.load_state_dict(state)
        return loss

    check(build, step)
