"""Watching a step from inside changes nothing and leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from spmd_verify.reference.observe import Observer, observed, positional_names


class Net(nn.Module):
    """Nested inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> dict[str, Any]:
        y = self.last(self.drop(self.first(x)))
        return {"y": y, "pair": (y, extra["z"] * 2)}


def _built() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(5, 3), torch.ones(2))


def _step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch[0], extra={"z": batch[1]})["y"].square().mean()
    loss.backward()
    optimizer.step()
    return loss


def _clipping_step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch[0], extra={"z": batch[1]})["y"].square().mean()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return loss


def test_stages_and_names() -> None:
    model, optimizer, batch = _built()
    record = observed(_step, labels=lambda b: [("targets", b[1])])(model, optimizer, batch)
    assert list(record["inputs"]) == ["targets", "x", "extra.z"]
    assert list(record["module_outputs"]) == [
        "first",
        "drop",
        "last",
        "model.y",
        "model.pair[0]",
        "model.pair[1]",
    ]
    assert list(record["loss"]) == ["loss"]
    assert list(record["gradients"]) == [n for n, _ in model.named_parameters()]
    assert record["clipping"] == {}
    assert not any(t.requires_grad for stage in record.values() for t in stage.values())


def test_watching_changes_neither_numbers_nor_random_stream() -> None:
    results = []
    for watch in (False, True):
        model, optimizer, batch = _built()
        step = observed(_step) if watch else _step
        for _ in range(2):
            step(model, optimizer, batch)
        results.append([*(p.detach() for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("error", [False, True])
def test_hooks_and_patches_are_gone_afterwards(error: bool) -> None:
    model, optimizer, batch = _built()
    before = clip_grad._group_tensors_by_device_and_dtype

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = _step(model, optimizer, batch)
        if error:
            raise RuntimeError("the user's step failed")
        return loss

    if error:
        with pytest.raises(RuntimeError, match="the user's step failed"):
            observed(step, order_gradients=True)(model, optimizer, batch)
    else:
        observed(step, order_gradients=True)(model, optimizer, batch)
    assert clip_grad._group_tensors_by_device_and_dtype is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_are_those_before_clipping() -> None:
    model, optimizer, batch = _built()
    record = observed(_clipping_step)(model, optimizer, batch)
    before = torch.cat([g.flatten() for g in record["gradients"].values()]).norm()
    after = torch.cat([record["clipping"][n].flatten() for n in record["gradients"]]).norm()
    assert torch.allclose(record["clipping"]["total_norm"], before)
    assert torch.allclose(after, before * record["clipping"]["clip_factor"])
    assert float(after) < 0.011 < float(before)


def test_clipping_by_value_is_seen_though_imported_by_name() -> None:
    model, optimizer, batch = _built()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch[0], extra={"z": batch[1]})["y"].square().mean()
        loss.backward()
        clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        return loss

    record = observed(step)(model, optimizer, batch)
    assert record["gradients"]["first.weight"].abs().max() > 1e-3
    assert record["clipping"]["first.weight"].abs().max() <= 1e-3 + 1e-9


def test_gradients_come_in_backward_order_if_asked() -> None:
    model, optimizer, batch = _built()
    record = observed(_step, order_gradients=True)(model, optimizer, batch)
    names = list(record["gradients"])
    assert max(names.index("last.weight"), names.index("last.bias")) < names.index("first.weight")


def test_a_module_used_twice_and_recomputation_are_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.inner(x), use_reentrant=False)

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        return loss

    record = observed(step)(model, optimizer, torch.randn(2, 3))
    assert list(record["module_outputs"]) == ["inner", "inner#2", "model"]


def test_two_optimizers_each_show_their_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]

    def step(model: nn.Module, optimizers: Any, batch: Tensor) -> Tensor:
        loss = model(batch).sum()
        loss.backward()
        for each in optimizers:
            each.step()
        return loss

    record = observed(step)(model, optimizers, torch.randn(2, 2))
    assert sorted(record["gradients"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_wrappers_are_named_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    model = Wrapper(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = observed(_step)(model, optimizer, (torch.randn(5, 3), torch.ones(2)))
    assert positional_names(model) == ("x", "extra")
    assert list(record["inputs"]) == ["x", "extra.z"]
    assert "first" in record["module_outputs"]
    assert "model.y" in record["module_outputs"]
    assert "first.weight" in record["gradients"]


def test_it_works_while_the_step_is_traced_on_fake_tensors() -> None:
    model, _, (x, z) = _built()
    model.drop.p = 0.0
    names = [n for n, _ in model.named_parameters()]
    values = [p.detach().clone() for p in model.parameters()]

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = model(batch[0], extra={"z": batch[1]})["y"].square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.01)
        return loss

    eager = observed(step)(model, [], (x, z))

    def traced(*flat: Tensor) -> list[Tensor]:
        leaves = [value.detach().requires_grad_() for value in flat[: len(names)]]
        with _reparametrize_module(model, dict(zip(names, leaves, strict=True))):
            record = observed(step)(model, [], flat[len(names) :])
        return [t for stage in record.values() for t in stage.values()]

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        arguments = [fake.from_tensor(v) for v in [*values, x, z]]
    graph = make_fx(traced, tracing_mode="real")(*values, x, z)
    found = graph(*values, x, z)
    expected = [t for stage in eager.values() for t in stage.values()]
    assert len(found) == len(expected)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    with fake:
        assert len(traced(*arguments)) == len(expected)


def test_an_observer_reads_gradients_even_without_an_optimizer_step() -> None:
    model, optimizer, batch = _built()
    with Observer(model, optimizer) as observer:
        model(batch[0], extra={"z": batch[1]})["y"].sum().backward()
    assert len(observer.record["gradients"]) == 4


def test_what_runs_inside_a_function_transform_is_passed_over() -> None:
    layer = nn.Linear(3, 1)
    parameters = dict(layer.named_parameters())

    def error(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (x,)).square().sum()

    with Observer(layer, []) as observer:
        found = torch.func.vmap(torch.func.grad(error), (None, 0))(parameters, torch.ones(4, 3))
        layer(torch.ones(2, 3))
    assert found["weight"].shape == (4, 1, 3)
    assert list(observer.record["module_outputs"]) == ["model"]
