"""Behaviours 16-18, 20-23, 27, 36-40, 49, 51: graphs and calls, all ranks in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from training import (
    FEW_STEPS,
    Recorded,
    adam,
    assert_same,
    batches,
    built,
    count,
    fused_adam,
    mean_loss,
    mlp,
    odd_mlp,
    sgd,
    single,
    state_of,
    sum_loss,
    train_step,
)

import spmd.lockstep
from spmd.errors import StepArgumentsError, StrictFallbackError, UnknownStyleError, UsageError
from spmd.layout import chunk_units, local_shape

STYLES = ("replicate", "fully_shard", "default")


def compiled(mode: Any, loss: Any = mean_loss, ranks: int = 2, **options: Any) -> Any:
    return spmd.lockstep.compile(parallel_mode=mode, mesh={"dp": ranks}, **options)(
        train_step(loss)
    )


def partitioned(mode: Any, make: Any = mlp, loss: Any = mean_loss, ranks: int = 2) -> Any:
    """Return what `partition` returned for the last capture of three steps."""
    model, optimizer = built(make, adam, warm=False)
    step = compiled(mode, loss, ranks)
    recorded = Recorded(mode)
    for x in batches(3):
        step(model, optimizer, x)
    return recorded.partitioned[-1], step


@pytest.mark.parametrize("style", STYLES)
def test_behaviour_16_no_marker_remains_and_nodes_name_their_origin(style: str) -> None:
    graph, step = partitioned(spmd.DataParallel(style))
    known = {node.name for node in step.program.graph.graph.nodes}
    for local in (graph, step.graph):
        local.graph.lint()
        assert not [n for n in local.graph.nodes if "mark_gradient" in str(n.target)]
        first_call = next(n for n in local.graph.nodes if n.meta and n.op == "call_function")
        after = False
        for node in local.graph.nodes:
            after = after or node is first_call
            if node.op == "placeholder" or (after and node.op == "call_function"):
                assert str(node.meta["global"]).partition("#")[0] in known, node
                assert node.meta["region"] in ("forward", "backward", "optimizer")
        lines = [n.meta.get("line") for n in local.graph.nodes if n.op == "call_function"]
        assert any("training.py" in (line or "") for line in lines)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("make", [mlp, odd_mlp])
def test_behaviour_17_placeholders_have_local_shapes(make: Any, style: str) -> None:
    ranks = 4
    graph, step = partitioned(spmd.DataParallel(style), make, ranks=ranks)
    specs = step.program.graph.meta["signature"].inputs
    wholes = step.program.graph.graph.find_nodes(op="placeholder")
    locals_ = graph.graph.find_nodes(op="placeholder")
    layouts = graph.meta["layouts"]["inputs"]
    seen = set()
    for spec, node, local, layout in zip(specs, wholes, locals_, layouts, strict=True):
        shape = tuple(node.meta["val"].shape)
        for rank in range(ranks):
            assert local.meta["local_shapes"][rank] == local_shape(shape, layout, (rank,))
        assert tuple(local.meta["val"].shape) == local.meta["local_shapes"][0]
        rows = [s[0] for s in local.meta["local_shapes"]] if shape else []
        if spec.kind == "argument":
            assert rows == [2, 2, 2, 2]
            seen.add("argument")
        elif spec.kind == "parameter":
            even = shape[0] % ranks == 0
            is_split = style == "fully_shard" or (style == "default" and even)
            expected = chunk_units(shape[0], ranks) if is_split else (shape[0],) * ranks
            assert tuple(rows) == expected
            seen.add("parameter")
    assert seen == {"argument", "parameter"}


def shaped_loss(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x).view(x.shape[0], 5, 1).expand(x.shape[0], 5, 3).reshape(x.shape[0], -1)
    weights = torch.ones(x.shape[0], 15) + torch.zeros(x.shape[0], 15) + x.new_zeros(x.shape[0], 1)
    return (hidden * weights).sum()


def global_sizes(graph: fx.GraphModule, size: int) -> list[fx.Node]:
    """Return calls that take the global size among their sizes."""
    sized = ("view", "expand", "ones", "zeros", "full", "reshape", "empty", "arange")
    found = []
    for node in graph.graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "").partition("::")[2]
        if any(word in name for word in sized):
            numbers = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
            found += [node] if any(type(n) is int and n == size for n in numbers) else []
    return found


@pytest.mark.parametrize("loss", [sum_loss, mean_loss, shaped_loss])
def test_behaviours_18_27_sizes_are_local(loss: Any) -> None:
    """A global batch of 12 over 2 ranks: no size of any view or factory is 12.

    The net ends in a non-linear operator: the gradient of a bare sum is a constant, and what
    is computed of constants and parameters alone stays whole on every rank.
    """
    model = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(spmd.DataParallel("replicate"), loss)
    for x in batches(2, rows=12):
        step(model, optimizer, x)
    assert global_sizes(step.program.graph, 12)
    assert global_sizes(step.graph, 12) == []
    assert global_sizes(step.graph, 6)


def test_behaviour_23_expand_mode_expands_to_the_local_batch() -> None:
    model, optimizer = built(lambda: nn.Sequential(nn.Linear(10, 10, bias=False)), sgd, warm=False)
    step = compiled(spmd.DTensorExpandMode(), sum_loss)
    step(model, optimizer, torch.randn(4, 10))
    expands = step.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default)
    assert [node.args[1] for node in expands] == [[2, 10]]


def test_behaviour_27_factories_without_a_batch_are_whole() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        rows, columns = torch.full((x.shape[0], 1), 2.0), torch.arange(8).float()
        return train_step(lambda m, x: (m(x) * rows * columns).sum())(model, optimizer, x)

    model, optimizer = built(mlp, sgd, warm=False)
    run = spmd.lockstep.compile(mesh={"dp": 2})(step)
    run(model, optimizer, batches(1, rows=12)[0])
    full = run.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert [node.args[0] for node in full] == [[6, 1]]
    ranges = [n for n in run.graph.graph.nodes if "arange" in str(n.target)]
    assert ranges
    assert all(8 in node.args for node in ranges)


def test_behaviour_20_expand_mode_returns_the_reduced_sum() -> None:
    data = batches(1)
    model, optimizer = built(mlp, sgd, warm=False)
    expected = sum_loss(model, data[0]).item()
    step = compiled(spmd.DTensorExpandMode(), sum_loss)
    loss = step(model, optimizer, data[0])
    locals_ = step.results.local
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert len(locals_) == 2
    assert torch.equal(locals_[0], locals_[1])


@pytest.mark.parametrize("make_optimizer", [sgd, adam, fused_adam])
def test_behaviour_21_expand_mode_is_one_device(make_optimizer: Any) -> None:
    data = batches(3)
    expected = single(mlp, make_optimizer, sum_loss, data)
    model, optimizer = built(mlp, make_optimizer, warm=False)
    step = compiled(spmd.DTensorExpandMode(), sum_loss)
    for x in data:
        step(model, optimizer, x)
    assert_same(state_of(model, optimizer), expected, **FEW_STEPS)


@pytest.mark.parametrize("make_optimizer", [adam, fused_adam])
def test_behaviour_22_one_all_reduce_for_one_gradient(make_optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False))
    optimizer = make_optimizer(model.parameters())

    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    run = spmd.lockstep.compile(parallel_mode=spmd.DTensorExpandMode(), mesh={"dp": 2})(step)
    for x in batches(3):
        run(model, optimizer, x)
    assert run.collectives == {"all_reduce": 1}


def test_behaviours_36_one_transformation_per_capture_before_it_runs() -> None:
    calls: list[tuple[int, fx.GraphModule]] = []
    model, optimizer = built(mlp, adam, warm=False)

    def transform(graph: fx.GraphModule) -> fx.GraphModule:
        calls.append((step.calls, graph))
        return graph

    step = compiled(spmd.DataParallel(), gm_transformation=transform)
    graphs = []
    for x in batches(5):
        step(model, optimizer, x)
        graphs.append(step.graph)
    # The first call finds no gradients and no optimizer state: it is another program than
    # the second. The third captures once more and finds the second's.
    assert [number for number, _ in calls] == [0, 1]
    assert graphs[0] is calls[0][1]
    assert all(g is calls[1][1] for g in graphs[1:])
    assert step.captures == 3


def test_behaviour_37_two_steps_and_two_models_share_nothing() -> None:
    data = batches(3)
    expected = single(mlp, adam, mean_loss, data)
    other = single(odd_mlp, sgd, mean_loss, data)
    shared = compiled(spmd.DataParallel("fully_shard"))
    first, second = built(mlp, adam, warm=False), built(odd_mlp, sgd, warm=False)
    third, alone = built(mlp, adam, warm=False), compiled(spmd.DataParallel("replicate"))
    for x in data:
        shared(*first, x)
        shared(*second, x)
        alone(*third, x)
    assert_same(state_of(*first), expected, **FEW_STEPS)
    assert_same(state_of(*second), other, **FEW_STEPS)
    assert_same(state_of(*third), expected, **FEW_STEPS)
    assert shared.graph is not alone.graph
    assert set(shared.state()["parameters"]) == {n for n, _ in second[0].named_parameters()}


def test_behaviour_38_what_is_refused() -> None:
    model, optimizer = built(mlp, sgd, warm=False)
    step = compiled(spmd.DataParallel())
    for args in ((optimizer,), (model, mlp(), optimizer), (model, optimizer, optimizer)):
        with pytest.raises(StepArgumentsError) as refusal:
            step(*args)
        assert isinstance(refusal.value, AssertionError)
    with pytest.raises(UnknownStyleError, match="default.*fully_shard.*replicate") as unknown:
        spmd.DataParallel("sharded")
    assert isinstance(unknown.value, RuntimeError)
    assert "DEFAULT" in spmd.DataParallelStyle.__members__


def test_behaviour_38_default_shards_what_divides() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd = nn.Linear(10, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.odd(self.even(x))

    data = batches(2)
    model, optimizer = built(Mixed, adam, warm=False)
    step = compiled(spmd.DataParallel("default"))
    for x in data:
        step(model, optimizer, x)
    lies = {n: p.layout.is_replicated for n, p in step.state()["parameters"].items()}
    assert lies == {"even.weight": False, "even.bias": False, "odd.weight": True, "odd.bias": True}
    states = {n: p.layout.is_replicated for n, p in step.state()["optimizer_state"].items()}
    assert not states["even.weight.exp_avg"]
    assert states["odd.weight.exp_avg"]
    assert states["even.weight.step"]
    assert_same(state_of(model, optimizer), single(Mixed, adam, mean_loss, data), **FEW_STEPS)


class Branching(nn.Module):
    """A submodule that decides on values, which capture refuses."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Smooth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.mul.Tensor(x, 2)


class Swap(spmd.Override):
    """Replaces modules of a class and notes what it was offered."""

    def __init__(self, kind: Any, new: Any, log: list[Any], name: str = "swap") -> None:
        self.kind, self.new, self.log, self.name = kind, new, log, name

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.log.append((self.name, fqn, type(orig_submodule).__name__))
        return self.new() if isinstance(orig_submodule, self.kind) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Any]) -> fx.GraphModule:
        coalesced = [n for n in gm.graph.nodes if "coalesced" in str(n.target)]
        self.log.append((self.name, "transform", len(flat_state), len(coalesced)))
        placeholders = gm.graph.find_nodes(op="placeholder")
        layouts = gm.meta["layouts"]["inputs"]
        for value, node, layout in zip(flat_state, placeholders, layouts, strict=False):
            shape = tuple(getattr(value, "shape", ()))
            assert local_shape(shape, layout, (0,)) == tuple(node.meta["val"].shape)
        return gm


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 8), Branching())
        self.second = nn.Sequential(Branching(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_behaviour_39_override() -> None:
    log: list[Any] = []
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model(torch.ones(2, 10)).sum()).backward()
    optimizer.step()
    overrides = [Swap(Branching, Smooth, log, "a"), Swap(Smooth, nn.Identity, log, "b")]
    step = compiled(spmd.DataParallel(), module_override=overrides)
    for x in batches(3):
        step(model, optimizer, x)
    offered = [entry for entry in log if len(entry) == 3]
    # Every name but the root, each override in order; the second sees what the first chose,
    # and what was replaced is not entered.
    assert offered == [
        ("a", "first", "Sequential"), ("b", "first", "Sequential"),
        ("a", "first.0", "Linear"), ("b", "first.0", "Linear"),
        ("a", "first.1", "Branching"), ("b", "first.1", "Smooth"),
        ("a", "second", "Sequential"), ("b", "second", "Sequential"),
        ("a", "second.0", "Branching"), ("b", "second.0", "Smooth"),
        ("a", "second.1", "Linear"), ("b", "second.1", "Linear"),
    ]  # fmt: skip
    assert isinstance(model.first[1], nn.Identity)
    # Once, after the passes (the reductions are joined), with values like the placeholders.
    transforms = [entry for entry in log if entry[1] == "transform"]
    assert [entry[0] for entry in transforms] == ["a", "b"]
    assert transforms[0][3] == 1


def test_an_override_must_return_a_module_and_a_graph() -> None:
    class NoModule(Swap):
        def replacement(self, fqn: str, orig_submodule: nn.Module) -> Any:
            return None

    class NoGraph(Swap):
        def transform(self, gm: fx.GraphModule, flat_state: list[Any]) -> Any:
            return None

    for override, slug in ((NoModule, "override-result"), (NoGraph, "not-a-graph")):
        model, optimizer = built(mlp, sgd, warm=False)
        step = compiled(spmd.DataParallel(), module_override=[override(Branching, Smooth, [])])
        with pytest.raises(UsageError, match=f"{override.__name__}.*{slug}"):
            step(model, optimizer, batches(1)[0])


def test_an_override_applies_to_each_model_once() -> None:
    log: list[Any] = []
    step = compiled(spmd.DataParallel(), module_override=[Swap(nn.ReLU, nn.Tanh, log)])
    for _ in range(3):
        model, optimizer = built(mlp, sgd, warm=False)
        step(model, optimizer, batches(1)[0])
        assert isinstance(model[1], nn.Tanh)
        del model, optimizer


def test_behaviour_40_last_train_step_is_swallowed() -> None:
    seen: list[Any] = []

    def step(model: Any, optimizer: Any, x: Tensor, **kwargs: Any) -> None:
        seen.append(kwargs)
        train_step(mean_loss)(model, optimizer, x)

    model, optimizer = built(mlp, sgd, warm=False)
    run = spmd.lockstep.compile(parallel_mode=spmd.DataParallel(), mesh={"dp": 2})(step)
    run(model, optimizer, batches(1)[0], last_train_step=False, other=1)
    run(model, optimizer, batches(1)[0], last_train_step=True, other=1)
    assert seen == [{"other": 1}, {"other": 1}]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)])
def test_behaviour_49_collectives_of_several_axes_run_again_on_new_inputs(sizes: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    data = batches(4)
    mesh = dict(zip("abc", sizes, strict=False))
    rows = [Shard(0), *[Replicate()] * (len(sizes) - 1)]
    columns = [*[Replicate()] * (len(sizes) - 1), Shard(0)]
    mode = spmd.DTensorExpandMode(
        input_placements={"x": rows}, parameter_placements={"0.*": columns, "2.weight": columns}
    )

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        return train_step(mean_loss)(model, optimizer, x)

    model, optimizer = built(mlp, adam, warm=False)
    run = spmd.lockstep.compile(parallel_mode=mode, mesh=mesh)(step)
    losses = [run(model, optimizer, x).item() for x in data]
    assert len(set(losses)) == len(data)
    assert run.captures == 3  # the graph was reused for the last batch
    assert_same(state_of(model, optimizer), single(mlp, adam, mean_loss, data), **FEW_STEPS)


def test_behaviour_51_dumped_graphs(tmp_path: Path) -> None:
    model, optimizer = built(mlp, sgd, warm=False)
    folder = tmp_path / "new" / "graphs"
    step = compiled(spmd.DataParallel(), dump_graphs=str(folder))
    step(model, optimizer, batches(1)[0])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["global_1.graph", "local_1.graph"]
    text = (folder / "local_1.graph").read_text()
    assert text == str(step.graph.graph)
    assert "all_reduce" in text
    assert "all_reduce" not in (folder / "global_1.graph").read_text()


def test_strict_refuses_what_would_be_gathered() -> None:
    @torch.library.custom_op("tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.register_fake(torch.empty_like)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = cube(x)
        return train_step(mean_loss)(model, optimizer, x)

    model, optimizer = built(mlp, sgd, warm=False)
    relaxed = spmd.lockstep.compile(mesh={"dp": 2})(step)
    relaxed(model, optimizer, batches(1)[0])
    assert relaxed.fallbacks
    strict = spmd.lockstep.compile(mesh={"dp": 2}, strict=True)(step)
    with pytest.raises(StrictFallbackError, match=r"test_behaviours_graphs.py:\d+"):
        strict(model, optimizer, batches(1)[0])


def test_strict_is_of_the_compiled_step_not_of_the_mode() -> None:
    mode = spmd.DataParallel()
    compiled(mode, strict=True)(*built(mlp, sgd, warm=False), batches(1)[0])
    assert mode.strict
    compiled(mode)(*built(mlp, sgd, warm=False), batches(1)[0])
    assert not mode.strict


def test_recapture_every_n_calls() -> None:
    def gone(model: Any, optimizer: Any, x: Tensor) -> None:
        train_step(mean_loss)(model, optimizer, x)
        optimizer.zero_grad()

    model, optimizer = built(mlp, sgd, warm=False)
    step = spmd.lockstep.compile(mesh={"dp": 2}, recapture_every=3)(gone)
    counts = []
    for x in batches(8):
        step(model, optimizer, x)
        counts.append(step.captures)
    assert counts == [1, 2, 2, 3, 3, 3, 4, 4]


def test_custom_passes_replace_the_default_ones_and_run() -> None:
    seen: list[fx.GraphModule] = []

    def note(graph: fx.GraphModule) -> fx.GraphModule:
        seen.append(graph)
        return graph

    for passes in (note, [note], ()):
        seen.clear()
        model, optimizer = built(mlp, sgd, warm=False)
        mode = spmd.DataParallel(custom_passes=passes)
        recorded = Recorded(mode)
        step = compiled(mode)
        step(model, optimizer, batches(1)[0])
        assert len(seen) == (1 if passes else 0)
        assert recorded.transformed == 1
        assert not any("coalesced" in name for name in step.collectives)
        assert step.collectives["all_reduce"] == 5  # four gradients and the loss


def test_one_pass_object_is_a_pipeline() -> None:
    from spmd.passes import PlaceWaitsLate

    model, optimizer = built(mlp, sgd, warm=False)
    step = compiled(spmd.DTensorExpandMode(PlaceWaitsLate()))
    step(model, optimizer, batches(1)[0])
    assert count(step.graph, "all_reduce") == 5


@pytest.mark.parametrize("where", ["gm_transformation", "custom_passes"])
def test_a_rewrite_that_returns_nothing_is_refused(where: str) -> None:
    passes = (lambda graph: None) if where == "custom_passes" else None
    options = {"gm_transformation": lambda graph: None} if where == "gm_transformation" else {}
    step = compiled(spmd.DataParallel(custom_passes=passes), **options)
    with pytest.raises(UsageError, match="returned NoneType.*not-a-graph"):
        step(*built(mlp, sgd, warm=False), batches(1)[0])


def test_on_cpu_one_gather_is_in_flight_at_a_time() -> None:
    from spmd.passes import WaitForGathersAtOnce

    graph, _ = partitioned(spmd.DataParallel("fully_shard"))
    late = spmd.passes.PlaceWaitsLate().apply(graph)
    assert most_in_flight(late) > 1
    before = count(late, "all_gather")
    at_once = WaitForGathersAtOnce().apply(late)
    at_once.graph.lint()
    assert most_in_flight(at_once) == 1
    assert count(at_once, "all_gather") == before


def most_in_flight(graph: fx.GraphModule) -> int:
    """Return how many all-gathers are started and not awaited, at most."""
    flying: set[fx.Node] = set()
    most = 0
    for node in graph.graph.nodes:
        if "all_gather" in str(node.target):
            flying.add(node)
        elif "wait_tensor" in str(node.target):
            flying.discard(node.args[0])
        most = max(most, len(flying))
    return most
