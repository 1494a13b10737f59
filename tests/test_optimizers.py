"""Every torch optimizer and hand-written ones: captured steps equal eager, on one device
bitwise, under every mode on four ranks to rounding."""

import math

import pytest
import torch
from lockstep_check import captured, check
from replay import Replay, compare
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from spmd.errors import CaptureError, UsageError
from spmd.lockstep import compile
from spmd.parallel_mode import DataParallel

torch.set_num_threads(1)

# Allowed per element of parameters and state; 0 is bitwise. Measured: all are bitwise.
MAX_ULP = 2

SINGLE, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


class Net(nn.Module):
    """Matrices, a vector and, unless only matrices are allowed, a 0-dim parameter."""

    def __init__(self, matrices_only=False):
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 8) / 2)
        self.second = nn.Parameter(torch.randn(8, 5) / 2)
        if not matrices_only:
            self.bias = nn.Parameter(torch.randn(5))
            self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        y = (x @ self.first).tanh() @ self.second
        return (y + self.bias).tanh() * self.scale if hasattr(self, "bias") else y


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


# -- hand-written optimizers -------------------------------------------------------------


class Lion(Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["m"] * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 1 - second)


class CountedAdam(Optimizer):
    """Counts in Python, writes through .data and keeps new tensors, as old code does."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p.data)
                    state["v"] = torch.zeros_like(p.data)
                state["step"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * p.grad.data
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                size = (
                    group["lr"] * math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])
                )
                p.data = p.data - size * state["m"] / (state["v"].sqrt() + 1e-8)


class Lars(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            size, slope = p.norm(), p.grad.norm()
            trust = torch.where((size > 0) & (slope > 0), 0.02 * size / slope, 1.0)
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad * trust)
            p.sub_(self.param_groups[0]["lr"] * momentum)


class NewtonSchulz(Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "steps": 3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                x = p.grad / (p.grad.norm() + 1e-7)
                if x.dim() == 2:
                    for _ in range(group["steps"]):
                        square = x @ x.T
                        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                p.add_(x, alpha=-group["lr"])


class Scheduled(Optimizer):
    """Counts updates in an attribute and sets its own learning rate."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.n_updates = 0

    @torch.no_grad()
    def step(self):
        self.n_updates += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.n_updates / 3) / math.sqrt(self.n_updates)
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


TORCH = {
    "sgd": (SGD, {}, (SINGLE, FOREACH, FUSED)),
    "sgd-momentum": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, (SINGLE, FOREACH, FUSED)),
    "sgd-dampening": (SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}, (SINGLE, FOREACH, FUSED)),
    "adam": (Adam, {}, (SINGLE, FOREACH, FUSED)),
    "adam-amsgrad": (Adam, {"amsgrad": True, "weight_decay": 0.1}, (SINGLE, FOREACH, FUSED)),
    "adamw": (AdamW, {"maximize": True}, (SINGLE, FOREACH, FUSED)),
    "adamax": (Adamax, {"weight_decay": 0.1}, (SINGLE, FOREACH)),
    "nadam": (NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, (SINGLE, FOREACH)),
    "radam": (RAdam, {}, (SINGLE, FOREACH)),
    "adagrad": (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}, (SINGLE, FOREACH, FUSED)),
    "adadelta": (Adadelta, {}, (SINGLE, FOREACH)),
    "rmsprop": (RMSprop, {"centered": True, "momentum": 0.9}, (SINGLE, FOREACH)),
    "rprop": (Rprop, {}, (SINGLE, FOREACH)),
    "asgd": (ASGD, {"t0": 2, "weight_decay": 0.1}, (SINGLE, FOREACH)),
    "adafactor": (Adafactor, {"weight_decay": 0.1}, (SINGLE, FOREACH)),
    "muon": (Muon, {}, ({},)),
    "lion": (Lion, {}, ({},)),
    "counted": (CountedAdam, {}, ({},)),
    "lars": (Lars, {}, ({},)),
    "newton-schulz": (NewtonSchulz, {}, ({},)),
    "scheduled": (Scheduled, {}, ({},)),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Every optimizer in both dtypes, every form of it in one; all of both take half a minute more.
FORMS = [
    pytest.param(
        name, {"lr": 0.01} | options | form, DTYPES[dtype], id="-".join([name, *form, dtype])
    )
    for name, (_, options, forms) in TORCH.items()
    for number, form in enumerate(forms)
    for dtype in (DTYPES if len(forms) == 1 else [list(DTYPES)[number % 2]])
]
# What is element-wise needs nothing from other ranks but the gradient.
WHOLE_TENSOR = ("adafactor", "muon", "lars", "newton-schulz")
# Their branches depend on the step or on the data: some steps are captured again.
CHANGING = ("radam", "asgd", "adafactor", "scheduled")


def batches(count=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 6, generator=generator, dtype=dtype),) for _ in range(count)]


@pytest.mark.parametrize(("name", "options", "dtype"), FORMS)
def test_five_steps_equal_eager(name, options, dtype):
    def build():
        model = Net(name == "muon").to(dtype)
        return model, TORCH[name][0](model.parameters(), **options)

    found, replay = compare(build, step, batches(dtype=dtype), reuse=True)
    worst = {n: d for different in found.values() for n, d in different.items()}
    assert all(isinstance(d, int) and d <= MAX_ULP for d in worst.values()), worst
    # Two to see that state is there, one more to see that nothing changes.
    assert replay.captures <= (5 if name in CHANGING else 4)


def outcomes(name):
    """Partition one step with warm state for every mode; compare with one device."""
    cls, options, _ = TORCH[name]
    batch = batches(dtype=torch.float64)[0]

    def warm(parameters):
        optimizer = cls(parameters, **({"lr": 0.01} | options))
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p) / 10
        optimizer.step()
        return optimizer

    torch.set_default_dtype(torch.float64)
    try:
        return check(lambda: Net(name == "muon"), warm, step, batch, ranks=(4,))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def plain():
    return outcomes("sgd")


# `check` copies the optimizer, and torch copies no attributes of optimizers.
@pytest.mark.parametrize("name", [n for n in TORCH if n != "scheduled"])
def test_every_mode_equals_one_device(name, plain):
    for expected, outcome in zip(plain, outcomes(name), strict=True):
        assert not outcome.fallbacks, (outcome.mode, outcome.fallbacks)
        if name not in WHOLE_TENSOR:
            assert outcome.collectives == expected.collectives, outcome.mode


@pytest.mark.parametrize("name", ["adam-amsgrad", "adafactor", "scheduled", "counted"])
def test_three_steps_in_lock_step(name):
    cls, options, _ = TORCH[name]
    pair = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Net().double()
        pair.append((model, cls(model.parameters(), **({"lr": 0.01} | options))))
    compiled = compile(parallel_mode=DataParallel("fully_shard"), mesh={"dp": 4})(step)
    for (x,) in batches(4, torch.float64):
        torch.testing.assert_close(compiled(*pair[0], x), step(*pair[1], x), rtol=1e-10, atol=1e-12)
    for p, q in zip(pair[0][0].parameters(), pair[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    if name != "adafactor":
        assert compiled.captures <= 3  # numbers that Python counts are inputs by then
    ours, theirs = (optimizer for _, optimizer in pair)
    assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])
    assert getattr(ours, "n_updates", 0) == getattr(theirs, "n_updates", 0)


# -- what changes between calls ---------------------------------------------------------------


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_hyper_parameters_changed_between_calls_need_no_capture(tensor):
    pair = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Net()
        lr = torch.tensor(0.01) if tensor else 0.01
        pair.append((model, Adam(model.parameters(), lr=lr, foreach=False)))
    replay = Replay(step, reuse=True)
    for number, (x,) in enumerate(batches(6)):
        for _, optimizer in pair:
            group = optimizer.param_groups[0]
            if tensor:
                group["lr"].mul_(0.9)
            else:
                group["lr"] = 0.01 / (number + 1)
            group["betas"] = (0.9 - 0.01 * number, 0.999)
        assert torch.equal(replay(*pair[0], x), step(*pair[1], x))
    for p, q in zip(pair[0][0].parameters(), pair[1][0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert replay.captures == 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_a_learning_rate_beside_complex_parameters_is_an_input(cls, dtype):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(6, 3, dtype=dtype))
            self.scale = nn.Parameter(torch.randn((), dtype=dtype))

        def forward(self, x):
            return (x.to(dtype) @ self.matrix * self.scale).abs()

    pair = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Complex()
        pair.append((model, cls(model.parameters(), lr=0.01, weight_decay=0.1)))
    compiled = compile(parallel_mode=DataParallel("fully_shard"), mesh={"dp": 4})(step)
    for number, (x,) in enumerate(batches(5)):
        for _, optimizer in pair:
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        torch.testing.assert_close(compiled(*pair[0], x), step(*pair[1], x))
    for p, q in zip(pair[0][0].parameters(), pair[1][0].parameters(), strict=True):
        assert p.dtype == dtype
        torch.testing.assert_close(p, q)
    assert compiled.captures <= 3


def test_groups_frozen_foreign_and_gradient_free_parameters():
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
            self.left_out = nn.Parameter(torch.ones(5))
            self.tied = self.second

        def forward(self, x):
            return super().forward(x) * self.frozen + self.left_out

    def build():
        model = Odd()
        foreign = nn.Parameter(torch.ones(2))
        groups = [
            {"params": [model.first, model.unused], "lr": 0.1, "weight_decay": 0.1},
            {"params": [model.second, model.bias, model.scale, model.frozen, foreign]},
        ]
        return model, AdamW(groups, lr=0.01)

    found, replay = compare(build, step, batches(), reuse=True)
    assert not found
    assert replay.captures <= 4


def test_warm_state_and_steps_of_eager_in_between():
    pair = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Net()
        pair.append((model, NAdam(model.parameters(), lr=0.01)))
    replay = Replay(step, reuse=True)
    for number, (x,) in enumerate(batches(6)):
        run = step if number in (0, 3) else replay
        assert torch.equal(run(*pair[0], x), step(*pair[1], x)), number


# -- refused ------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x):
        return self.table(x.abs().long() % 5)


@pytest.mark.parametrize("cls", [LBFGS, SparseAdam])
def test_optimizers_refused_by_name(cls):
    model = Sparse()
    with pytest.raises(UsageError, match=cls.__name__):
        captured(model, cls(list(model.parameters())), step, batches()[0], {})


def test_sparse_gradients_are_refused_with_the_parameter_and_the_line():
    model = Sparse()
    with pytest.raises(
        CaptureError, match=r"test_optimizers.py:\d+: parameter 'table.weight'.*sparse"
    ):
        captured(model, SGD(model.parameters()), step, batches()[0], {})


def test_a_sparse_gradient_from_before_is_refused():
    model = Sparse()
    optimizer = SGD(model.parameters())
    model(batches()[0][0]).sum().backward()
    with pytest.raises(UsageError, match=r"table.weight.*sparse"):
        captured(model, optimizer, step, batches()[0], {})
