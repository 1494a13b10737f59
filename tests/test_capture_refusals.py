"""What cannot be captured is refused with the user's line, and leaves everything as it was."""

import inspect
import math
import sys

import pytest
import torch
from replay import Replay, differences, snapshot
from torch import nn

from spmd.errors import CaptureError
from spmd.swapping import is_fake

torch.set_num_threads(1)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return model, torch.optim.Adam(model.parameters(), foreach=False)


def step_around(loss_of):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def by_if(model, x):
    y = model(x).sum()
    if y > 0:  # here
        y = y * 2
    return y


def by_any(model, x):
    y = model(x)
    if (y > 0).any():  # here
        y = y * 2
    return y.sum()


def by_bool(model, x):
    return model(x).sum() * (2 if bool(x[0, 0] > 0) else 1)  # here


def by_while(model, x):
    y = model(x)
    while y.norm() > 1:  # here
        y = y / 2
    return y.sum()


def by_range(model, x):
    return sum(model(x).sum() for _ in range(int(x.shape[0] * x.abs().max())))  # here


def by_assert(model, x):
    y = model(x).sum()
    assert y.isfinite(), "loss"  # here
    return y


def by_item(model, x):
    y = model(x).sum()
    if y.item() > 3:  # here
        y = y * 2
    return y


def by_list(model, x):
    return model(x).sum() if x[0].tolist()[1] > 0 else model(x).mean()  # here


def by_float(model, x):
    y = model(x).sum()
    return y * math.floor(float(y))  # here


def by_index(model, x):
    return model(x).sum() * [1, 2][(x[0, 0] > 0).long()]  # here


def by_membership(model, x):
    return model(x).sum() * (2 if 1.0 in x else 1)  # here


def by_equal(model, x):
    return model(x).sum() * (2 if torch.equal(x, x.abs()) else 1)  # here


def by_allclose(model, x):
    return model(x).sum() * (2 if torch.allclose(x, x.abs()) else 1)  # here


def by_maximum(model, x):
    y = model(x)
    return max(y.sum(), y.mean())  # here


def by_sorting(model, x):
    y = model(x)[:, 0]
    return sorted(y, key=lambda v: v.item())[0] + y.sum()  # here


def by_swallowed_error(model, x):
    y = model(x).sum()
    try:
        if y > 0:  # here
            y = y * 2
    except RuntimeError:
        pass
    return y


def by_numpy(model, x):
    y = model(x)
    return y.sum() * float(y.detach().numpy().sum())  # here


def in_a_nested_function(model, x):
    def choose(z):
        return z * 2 if z.sum() > 0 else z  # here

    return (lambda z: choose(z))(model(x)).sum()


BRANCHES = [by_if, by_any, by_bool, by_while, by_range, by_assert, by_item, by_list, by_float,
            by_index, by_membership, by_equal, by_allclose, by_maximum, by_sorting,
            by_swallowed_error, by_numpy, in_a_nested_function]  # fmt: skip


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


def fakes_in(value, depth=0):
    if is_fake(value):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return (
        depth < 5
        and isinstance(value, (list, tuple))
        and any(fakes_in(v, depth + 1) for v in value)
    )


def assert_untouched(model, optimizer, before, step, x):
    assert not differences(snapshot(model, optimizer), before)
    holders = [*map(vars, model.modules()), vars(optimizer), *map(vars, model.parameters())]
    assert not any(fakes_in(holder) for holder in holders)
    assert not any(is_fake(p) or is_fake(p.grad) for p in model.parameters())
    assert "step" not in vars(optimizer)
    step(model, optimizer, x)


@pytest.mark.parametrize("loss_of", BRANCHES, ids=lambda f: f.__name__)
def test_branches_on_tensors_are_refused_with_the_line(loss_of):
    (model, optimizer), x = build(), torch.randn(6, 4)
    plain = step_around(lambda m, x: m(x).sum())
    plain(model, optimizer, x)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError) as raised:
        Replay(step_around(loss_of))(model, optimizer, x)
    assert raised.value.location == f"{__file__}:{line_of(loss_of)}"
    assert str(raised.value).startswith(raised.value.location)
    assert_untouched(model, optimizer, before, plain, x)


def by_jagged(model, x):
    parts = [x[:1], x[:2]]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).values().sum()  # here


def by_jagged_view(model, x):
    parts = [model(x)[:1], model(x)[:2]]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).values().sum()  # here


@pytest.mark.parametrize("loss_of", [by_jagged, by_jagged_view], ids=lambda f: f.__name__)
def test_nested_tensors_are_refused_with_the_line(loss_of):
    (model, optimizer), x = build(), torch.randn(6, 4)
    with pytest.raises(CaptureError, match="nested-tensor") as raised:
        Replay(step_around(loss_of))(model, optimizer, x)
    assert raised.value.location == f"{__file__}:{line_of(loss_of)}"
    assert torch.nested.nested_tensor([x[:1], x[:2]], layout=torch.jagged).is_nested


def test_the_line_in_a_model_imported_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "deep_user_model.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n"
        "        y = super().forward(x)\n        if y.sum() > 0:\n            y = y * 2\n"
        "        return y\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from deep_user_model import Model

    model = Model(4, 3)
    with pytest.raises(CaptureError, match=r"deep_user_model.py:7: Python control flow"):
        Replay(step_around(lambda m, x: m(x).sum()))(
            model, torch.optim.SGD(model.parameters()), torch.randn(2, 4)
        )
    del sys.modules["deep_user_model"]


def raises_late(model, x):
    model.cache = model(x)
    model.lists = [model.cache, {"x": model.cache}]
    model[0].counted = model.cache.sum().item()
    model.register_buffer("noise", torch.randn_like(x))
    torch.randn(3)
    raise KeyError("the user's own")


def new_parameter(model, x):
    model.extra = nn.Parameter(torch.zeros(3))
    return (model(x) + model.extra).sum()


def stranger(model, x):
    return (model(x) + STRANGER).sum()


STRANGER = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("loss_of", "error", "text"),
    [
        (raises_late, KeyError, "the user's own"),
        (new_parameter, CaptureError, "parameter 'extra'"),
        (stranger, CaptureError, r"\[3\] that is neither in the model nor in the optimizer"),
    ],
)
def test_nothing_fake_stays_after_an_error(loss_of, error, text):
    (model, optimizer), x = build(), torch.randn(6, 4)
    plain = step_around(lambda m, x: m(x).sum())
    plain(model, optimizer, x)
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=text):
        Replay(step_around(loss_of))(model, optimizer, x)
    for name in ("extra", "noise"):
        model._parameters.pop(name, None)
        model._buffers.pop(name, None)
    assert_untouched(model, optimizer, before, plain, x)
    assert STRANGER.grad is None


def test_parameters_that_share_memory_are_refused():
    model, optimizer = build()
    model[1] = nn.Linear(5, 5)
    model.append(nn.Linear(5, 5))
    model[2].weight = nn.Parameter(model[1].weight.data)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CaptureError, match=r"'1.weight' and parameter '2.weight' share memory"):
        Replay(step_around(lambda m, x: m(x).sum()))(model, optimizer, torch.randn(2, 4))


def test_assigning_data_of_another_shape_is_refused():
    def loss_of(model, x):
        model[0].bias.data = torch.zeros(7)
        return model(x).sum()

    with pytest.raises(CaptureError, match=r"assigns .data of shape \[7\]"):
        Replay(step_around(loss_of))(*build(), torch.randn(2, 4))


@pytest.mark.parametrize("reuse", [False, True])
def test_sizes_taken_with_item_are_guarded(reuse):
    def loss_of(model, x):
        count = (x[:, 0] > 0).sum()
        number = count.item()
        first, second = torch.split(model(x), [number, x.shape[0] - number])
        return (
            first.sum() + 2 * second.square().sum() + model(x)[: count.item()].sum()
            + torch.arange(number).sum() + torch.ones(number, 2).sum() + x[number - 1].sum()
        )  # fmt: skip

    ours, theirs = build(), build()
    step = step_around(loss_of)
    replay = Replay(step, reuse)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(6, 4, generator=generator)
        assert torch.equal(replay(*ours, x), step(*theirs, x))


def test_compiled_submodules_are_traced_as_written():
    ours, theirs = build(), build()
    ours[0][1] = torch.compile(ours[0][1])
    step = step_around(lambda m, x: m(x).sum())
    x = torch.randn(6, 4)
    for _ in range(2):
        assert torch.equal(Replay(step)(*ours, x), step(*theirs, x))
