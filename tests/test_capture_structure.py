"""Two captures of a step have one fingerprint exactly if one graph can stand for both."""

import pytest
import torch
from replay import Replay
from torch import nn

from spmd.structure import difference, fingerprint

torch.set_num_threads(1)


class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.calls = 0
        self.scale = torch.ones(3)


def programs(loss_of, optimizer=torch.optim.AdamW, count=2, **options):
    """Return the programs of two calls that find state there."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer(model.parameters(), **options)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        result = loss_of(model, x)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        return result

    replay, found = Replay(step), []
    for number in range(count + 1):
        replay.counters = frozenset()  # numbers stay constants, to see them differ
        replay(model, optimizer, torch.randn(5, 4))
        if number:
            found.append(replay.program)
    return found


def pure(model, x):
    return (model(x) * model.scale).square().sum()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_pure_step_has_one_fingerprint(optimizer, foreach):
    first, second = programs(pure, optimizer, foreach=foreach)
    assert fingerprint(first) == fingerprint(second)
    assert difference(first, second) is None
    assert first.graph is not second.graph


def counted(model, x):
    model.calls += 1
    return pure(model, x) * model.calls


def counted_aside(model, x):
    model.calls += 1
    return pure(model, x)


def counted_in_a_tensor(model, x):
    model.calls += 1
    return pure(model, x) * torch.tensor(float(model.calls))


def counted_into_the_result(model, x):
    model.calls += 1
    return pure(model, x), {"calls": model.calls}


def longer_every_time(model, x):
    model.calls += 1
    return sum(pure(model, x) for _ in range(model.calls))


def other_keys(model, x):
    model.calls += 1
    loss = pure(model, x)
    return loss, {f"loss{model.calls}": loss}


def other_attribute(model, x):
    model.calls += 1
    setattr(model, f"kept{model.calls}", x.sum())
    return pure(model, x)


@pytest.mark.parametrize(
    "loss_of",
    [counted, counted_aside, counted_in_a_tensor, counted_into_the_result, longer_every_time,
     other_keys, other_attribute],
)  # fmt: skip
def test_what_python_changed_shows(loss_of):
    first, second = programs(loss_of)
    assert fingerprint(first) != fingerprint(second)
    assert difference(first, second)


def test_names_of_nodes_do_not_count():
    first, second = programs(pure)
    for node in second.graph.graph.nodes:
        if node.op == "call_function":
            node.name = f"{node.name}_renamed"
    second.graph.meta["signature"].gradients = {
        name: f"{node}_renamed" for name, node in second.graph.meta["signature"].gradients.items()
    }
    assert fingerprint(first) == fingerprint(second)


def test_every_constant_counts():
    losses = [lambda m, x, k=k: pure(m, x) * k for k in (2.0, 2.0000000000000004)]
    first, second = programs(losses[0])[0], programs(losses[1])[0]
    assert fingerprint(first) != fingerprint(second)


WIDTH = 2
SHIFT = 0.5


def _scaled(x):
    return x * WIDTH


def _shifted(x):
    return x + SHIFT


def test_constants_that_several_functions_of_a_file_name_are_no_counters():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = _shifted(_scaled(model(x))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(3, 2)
    replay = Replay(step)
    replay(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 3))

    assert not replay.counters
    assert not replay.program.python
    assert replay.program.is_portable
