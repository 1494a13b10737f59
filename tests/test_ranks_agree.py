"""What every rank of a compiled step may rely on: nobody waits, nothing differs silently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import Ranks, caught
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from training import (
    FEW_STEPS,
    MANY_STEPS,
    adam,
    assert_same,
    batches,
    built,
    mean_loss,
    mlp,
    momentum,
    odd_mlp,
    part,
    sgd,
    single,
    state_of,
    train_step,
    whole,
)

import spmd

pytestmark = pytest.mark.dist


def step_for(style: str = "replicate", **options: Any) -> Any:
    return spmd.compile(parallel_mode=spmd.DataParallel(style), **options)(train_step(mean_loss))


def text_of(function: Any, *args: Any, **kwargs: Any) -> str:
    error = caught(function, *args, **kwargs)
    return f"{type(error).__name__}: {error}"


# -- shapes -------------------------------------------------------------------------------


def change_batch(style: str, batch: str) -> int:
    """Behaviour 32: other batch sizes on later calls, uneven and smaller than the ranks."""
    data = [torch.randn(n, 10, generator=torch.Generator().manual_seed(n)) for n in SIZES]
    model, optimizer = built(mlp, momentum, warm=False)
    step = step_for(style, batch=batch)
    for x in data:
        step(model, optimizer, part(x) if batch == "local" else x)
    assert_same(state_of(model, optimizer), single(mlp, momentum, mean_loss, data), **FEW_STEPS)
    return step.captures


SIZES = (8, 7, 8, 8, 1, 7, 7, 8, 7)


@pytest.mark.parametrize("batch", ["local", "global"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_behaviour_32_another_batch_size_is_captured_anew(
    on_ranks: Ranks, style: str, batch: str
) -> None:
    captures = on_ranks(change_batch, style, batch)
    assert captures[0] == captures[1]
    # 8: without state, with it, agreed; 7 and 1 are captured anew: 7 twice and agreed.
    assert captures[0] == 3 + 2 + 1


def one_rank_changes() -> list[str]:
    """Rank 1 alone passes another size: everyone is told, nobody waits, and goes on."""
    model, optimizer = built(mlp, sgd, warm=False)
    step = step_for()
    x = batches(1)[0]
    for _ in range(3):
        step(model, optimizer, part(x))
    told = [
        text_of(step, model, optimizer, part(x)[: 2 if dist.get_rank() == 1 else 4]),
        text_of(step, model, optimizer, part(x)[: 3 if dist.get_rank() == 0 else 4]),
        text_of(step, model, optimizer, part(x)[:, : 9 if dist.get_rank() == 0 else 10]),
        text_of(step, model, optimizer, part(x).double() if dist.get_rank() else part(x)),
        text_of(step, model, optimizer, part(x), *([x] if dist.get_rank() else [])),
        text_of(step, *([model] if dist.get_rank() else []), optimizer, part(x)),
    ]
    step(model, optimizer, part(x))
    expected = single(mlp, sgd, mean_loss, [x] * 4)
    assert_same(state_of(model, optimizer), expected, **FEW_STEPS)
    return told


def test_behaviour_32_one_rank_with_another_shape_leaves_nobody_waiting(on_ranks: Ranks) -> None:
    told = on_ranks(one_rank_changes)
    assert told[0][:5] == told[1][:5]
    chunk, short, width, dtype, extra = told[0][:5]
    assert "'x'" not in chunk  # the argument of `step` is *batch
    assert "[4, 2]" in chunk
    assert "gives [3, 3]" in chunk
    assert "[batch-parts]" in chunk
    assert "[3, 4]" in short
    assert "[batch-parts]" in short
    assert "Dim 1 of input" in width
    assert "[9, 10]" in width
    assert "torch.float32" in dtype
    assert "[ranks-differ]" in dtype
    assert "[ranks-differ]" in extra
    # A rank that fails alone tells the others why.
    assert "StepArgumentsError" in told[0][5]
    assert told[1][5].startswith("StepArgumentsError") or told[1][5].startswith("OtherRankError")
    assert {told[0][5].split(":")[0], told[1][5].split(":")[0]} == {
        "StepArgumentsError", "OtherRankError"
    }  # fmt: skip


def one_rank_raises() -> str:
    """The user's code raises on one rank only, while the step is captured."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("planted")
        return train_step(mean_loss)(model, optimizer, x)

    model, optimizer = built(mlp, sgd, warm=False)
    return text_of(spmd.compile()(step), model, optimizer, part(batches(1)[0]))


def test_a_rank_whose_step_raises_stops_the_others(on_ranks: Ranks) -> None:
    told = on_ranks(one_rank_raises)
    assert told[1] == "ValueError: planted"
    assert told[0].startswith("OtherRankError: Rank 1 of the mesh stopped")
    assert "ValueError: planted" in told[0]
    assert "[other-rank]" in told[0]


def other_programs() -> str:
    """The ranks' Python differs, so their collectives would not meet."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = train_step(mean_loss)(model, optimizer, x)
        return (loss, x.sum()) if dist.get_rank() == 0 else loss

    model, optimizer = built(mlp, sgd, warm=False)
    return text_of(spmd.compile()(step), model, optimizer, part(batches(1)[0]))


def test_ranks_that_compile_other_collectives_are_refused(on_ranks: Ranks) -> None:
    for told in on_ranks(other_programs):
        assert "UsageError" in told
        assert "[ranks-differ]" in told


def other_models(what: str) -> str:
    model, optimizer = built(mlp, sgd, warm=False)
    if dist.get_rank() == 1:
        if what == "shape":
            model[2] = nn.Linear(16, 9)
        else:
            model.register_buffer("more", torch.ones(2))
        optimizer = sgd(model.parameters())
    return text_of(step_for(), model, optimizer, part(batches(1)[0]))


@pytest.mark.parametrize("what", ["shape", "buffer"])
def test_ranks_that_built_other_models_are_refused(on_ranks: Ranks, what: str) -> None:
    for told in on_ranks(other_models, what):
        assert "[ranks-differ]" in told
        assert ("2.weight" if what == "shape" else "buffer 'more'") in told


def python_arguments() -> str:
    def step(model: Any, optimizer: Any, x: Tensor, scale: float) -> Tensor:
        return train_step(lambda m, x: scale * mean_loss(m, x))(model, optimizer, x)

    model, optimizer = built(mlp, sgd, warm=False)
    return text_of(
        spmd.compile()(step), model, optimizer, part(batches(1)[0]), 1.0 + dist.get_rank()
    )


def test_python_arguments_that_differ_are_refused(on_ranks: Ranks) -> None:
    for told in on_ranks(python_arguments):
        assert "1.0" in told
        assert "2.0" in told
        assert "[ranks-differ]" in told


def global_batches_differ() -> list[str]:
    x = batches(1)[0]
    return [
        text_of(step_for(batch="global"), *built(mlp, sgd, warm=False), mine)
        for mine in (x + dist.get_rank(), x[: 8 - dist.get_rank()])
    ]


def test_a_global_batch_that_differs_is_refused(on_ranks: Ranks) -> None:
    for values, shapes in on_ranks(global_batches_differ):
        assert "[batch-differs]" in values
        assert "other values of shape [8, 10]" in values
        assert "[8, 10] and [7, 10]" in shapes


# -- input_batch_dim ----------------------------------------------------------------------


def masked(
    model: Any, optimizer: Any, x: Tensor, y: Tensor, mask: Tensor, weight: Tensor
) -> Tensor:
    """One step on x [batch, 6, 10], y [batch], mask [6, 6], weight []."""
    optimizer.zero_grad()
    out = (mask @ model(x)).mean((1, 2))
    loss = ((out - y) ** 2 * weight).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_mask(rows: int, dims: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(rows, 6, 10, generator=generator), torch.randn(rows, generator=generator)
    mask, weight = torch.ones(6, 6).tril(), torch.tensor(0.5)
    expected, plain_optimizer = built(mlp, momentum, warm=False)
    model, optimizer = built(mlp, momentum, warm=False)
    mode = spmd.DataParallel("fully_shard", input_batch_dim=dims)
    step = spmd.compile(parallel_mode=mode)(masked)
    for _ in range(3):
        masked(expected, plain_optimizer, x, y, mask, weight)
        step(model, optimizer, part(x), part(y), mask, weight)
    assert_same(state_of(model, optimizer), state_of(expected, plain_optimizer), **FEW_STEPS)


@pytest.mark.parametrize(
    ("rows", "dims"),
    [
        (8, 0),
        (7, 0),
        (11, {"x": 0}),
        (12, {"mask": None}),  # each rank's part has the mask's size
        (12, {"x": 0, "y": 0, "mask": None, "weight": None}),
    ],
)
def test_arguments_without_a_batch_are_legal(on_ranks: Ranks, rows: int, dims: Any) -> None:
    on_ranks(with_mask, rows, dims)


def wrong_dims() -> list[str]:
    x, y = torch.randn(8, 6, 10), torch.arange(8.0)
    mask, weight = torch.ones(6, 6), torch.tensor(0.5)
    told = []
    for dims in (1, 3, {"x": 3}, {"z": 0}, {"x": 1, "y": 0}):
        mode = spmd.DataParallel(input_batch_dim=dims)
        step = spmd.compile(parallel_mode=mode)(masked)
        model, optimizer = built(mlp, sgd, warm=False)
        rank = dist.get_rank()
        own = x + rank, y + rank
        told.append(text_of(step, model, optimizer, *(part(v) for v in own), mask, weight))
    return told


def test_a_wrong_batch_dim_is_refused_with_input_shape_and_reason(on_ranks: Ranks) -> None:
    for rank_told in on_ranks(wrong_dims):
        y_differs, out_of_range, named, unknown, _ = rank_told
        # dim 1 exists in x, but then y would be the same everywhere, and it is not.
        assert "Input 'y' of shape [4] is split along no dim" in y_differs
        assert "[input-batch-dim]" in y_differs
        assert "input_batch_dim=3" in out_of_range
        assert "'x' has shape" in out_of_range
        assert "input_batch_dim['x'] is 3" in named
        assert "argument 'z'" in unknown
        assert all("UsageError" in told for told in (y_differs, out_of_range, named, unknown))


# -- what the model and the optimizer hold ------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 10), nn.Linear(10, 12, bias=False)
        self.head.weight = self.embed.weight
        self.also = [self.embed.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.embed.weight.t()) @ self.also[0])


def keep_ties() -> None:
    data = batches(3)
    model, optimizer = built(Tied, adam, warm=False)
    step = step_for("fully_shard")
    for x in data:
        step(model, optimizer, part(x))
    assert isinstance(model.embed.weight, DTensor)
    assert model.head.weight is model.embed.weight
    assert model.also[0] is model.embed.weight
    assert len(optimizer.state) == 1
    assert_same(state_of(model, optimizer), single(Tied, adam, mean_loss, data), **FEW_STEPS)


def test_behaviour_31_tied_parameters_stay_one_dtensor(on_ranks: Ranks) -> None:
    on_ranks(keep_ties)


def hooks_and_lists() -> None:
    """Hooks, attributes and lists of parameters outside the module survive the conversion."""

    def run(compiled: bool) -> Any:
        model, optimizer = built(mlp, sgd, warm=False)
        listed = list(model.parameters())
        model[0].weight.tag = "kept"
        handle = model[0].weight.register_hook(lambda g: g * 2)

        def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(listed, 0.05)
            optimizer.step()
            return loss.detach()

        call = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(step)
        for index, x in enumerate(batches(5)):
            if index == 4:
                handle.remove()
            if compiled:
                call(model, optimizer, part(x))
            else:
                step(model, optimizer, x)
        assert model[0].weight.tag == "kept"
        return state_of(model, optimizer)

    assert_same(run(compiled=True), run(compiled=False), **FEW_STEPS)


def test_hooks_attributes_and_lists_of_parameters_go_on_working(on_ranks: Ranks) -> None:
    on_ranks(hooks_and_lists)


def two_optimizers() -> None:
    """Two compiled functions, each with its own optimizer and style, on one model."""
    data = batches(4)

    def run(first: Any, second: Any, cut: Any) -> Any:
        torch.manual_seed(0)
        model = mlp()
        one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        two = torch.optim.Adam(model[2].parameters(), lr=0.01)
        for x in data:
            first(model, one, cut(x))
            second(model, two, cut(x))
        return {n: whole(p) for n, p in model.named_parameters()}

    plain = run(train_step(mean_loss), train_step(mean_loss), lambda x: x)
    ours = run(step_for("fully_shard"), step_for("replicate"), part)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, **FEW_STEPS)


def test_two_compiled_steps_with_other_styles_share_a_model(on_ranks: Ranks) -> None:
    on_ranks(two_optimizers)


def evaluate() -> None:
    """A compiled step without an optimizer, on the sharded model."""
    model, optimizer = built(mlp, sgd, warm=False)
    data = batches(2)
    step_for("fully_shard")(model, optimizer, part(data[0]))
    expected = copy.deepcopy(mlp())
    train, plain = built(mlp, sgd, warm=False)
    train_step(mean_loss)(train, plain, data[0])
    run = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(lambda m, x: m(x))
    with torch.no_grad():
        out = run(model, part(data[1]))
        torch.testing.assert_close(out, part(train(data[1])))
    assert run.results.layout.placements[0].units == (4, 4)
    assert expected is not train


def test_a_step_without_an_optimizer(on_ranks: Ranks) -> None:
    on_ranks(evaluate)


def loop(change: str, style: str) -> None:
    """Between the calls a scheduler steps, gradients stay, parameters freeze."""

    def run(step: Any, cut: Any) -> Any:
        model, optimizer = built(mlp, momentum, warm=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for index, x in enumerate(batches(5)):
            step(model, optimizer, cut(x))
            if change == "scheduler":
                scheduler.step()
            if change == "lr":
                optimizer.param_groups[0]["lr"] = 0.02 * (index + 1)
            if change == "freeze":
                model[0].weight.requires_grad_(index % 2 == 0)
            if change == "train":
                model.train(index % 2 == 0)
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return state_of(model, optimizer) | {"gradients": gradients}

    def accumulate(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = mean_loss(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    body = accumulate if change == "accumulate" else train_step(mean_loss)
    ours = run(spmd.compile(parallel_mode=spmd.DataParallel(style))(body), part)
    assert_same(ours, run(body, lambda x: x), **FEW_STEPS)


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("change", ["scheduler", "lr", "freeze", "train", "accumulate"])
def test_behaviour_34_what_changes_between_calls_is_honoured(
    on_ranks: Ranks, change: str, style: str
) -> None:
    on_ranks(loop, change, style)


def bytes_held(style: str) -> int:
    model, optimizer = built(
        lambda: nn.Sequential(nn.Linear(10, 64), nn.Linear(64, 32)), adam, False
    )
    step = step_for(style)
    for x in batches(2):
        step(model, optimizer, part(x))
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    local = [t.to_local() for t in tensors]
    return sum(t.untyped_storage().nbytes() for t in local)


def test_fully_shard_holds_its_share_of_the_bytes(on_ranks: Ranks) -> None:
    everything = on_ranks(bytes_held, "replicate")[0]
    assert everything == 4 * 4 * (10 * 64 + 64 + 64 * 32 + 32)
    assert on_ranks(bytes_held, "fully_shard") == [everything // 2] * 2


def draw_differently(style: str) -> None:
    """Ranks with other generator states draw rank 0's numbers and keep their own stream."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(10, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.fc(x)) + 0.1 * torch.randn(8)

    data = batches(4)
    model, optimizer = built(Noisy, momentum, warm=False)
    expected, plain = built(Noisy, momentum, warm=False)
    torch.manual_seed(7)
    for x in data:
        train_step(mean_loss)(expected, plain, x)
    torch.manual_seed(7 + 5 * dist.get_rank())
    before = torch.get_rng_state()
    step = step_for(style)
    for x in data:
        step(model, optimizer, part(x))
    assert_same(state_of(model, optimizer), state_of(expected, plain), **FEW_STEPS)
    assert torch.equal(before, torch.get_rng_state()) == (dist.get_rank() > 0)


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_every_rank_draws_rank_0s_numbers(on_ranks: Ranks, style: str) -> None:
    on_ranks(draw_differently, style)


# -- data-dependent sizes -----------------------------------------------------------------


def positive_mean(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(x)
    loss = out[x[:, 0] > 0].square().sum() / x[x[:, 0] > 0].shape[0]
    loss.backward()
    optimizer.step()
    return loss.detach()


def data_dependent(reduction: str) -> int:
    data = batches(6)
    mode = spmd.DataParallel("replicate", gradient_reduction=reduction)
    step = spmd.compile(parallel_mode=mode)(positive_mean)
    model, optimizer = built(mlp, sgd, warm=False)
    expected, plain = built(mlp, sgd, warm=False)
    if reduction == "mean":
        expected = nn.parallel.DistributedDataParallel(expected)
    for x in data:
        step(model, optimizer, part(x))
        positive_mean(expected, plain, part(x) if reduction == "mean" else x)
    assert_same(state_of(model, optimizer), state_of(expected, plain), **MANY_STEPS)
    return step.captures


@pytest.mark.parametrize("reduction", ["global", "mean"])
def test_data_dependent_sizes_are_captured_on_all_ranks(on_ranks: Ranks, reduction: str) -> None:
    captures = on_ranks(data_dependent, reduction)
    assert captures[0] == captures[1]


# -- meshes -------------------------------------------------------------------------------


def on_a_2d_mesh(style: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    data = batches(2)
    model, optimizer = built(odd_mlp, momentum, warm=False)
    for given in (mesh, {"a": 2, "b": 2}):
        mode = spmd.DataParallel(style, mesh=given)
        step = spmd.compile(parallel_mode=mode)(train_step(mean_loss))
        for x in data:
            step(model, optimizer, part(x))
    assert model[0].weight.device_mesh.ndim == 1
    assert_same(
        state_of(model, optimizer), single(odd_mlp, momentum, mean_loss, data * 2), **FEW_STEPS
    )


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_data_parallel_uses_a_2d_mesh_as_one_axis(on_ranks: Ranks, style: str) -> None:
    on_ranks(on_a_2d_mesh, style, num_ranks=4)


def expand_on_a_2d_mesh(batch: str) -> None:
    """The batch over axis a, the layers' weights over axis b: a tensor-parallel plan."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    data = [torch.randn(7, 10, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    mode = spmd.DTensorExpandMode(
        mesh=mesh,
        parameter_placements={
            "0.*": [Replicate(), Shard(0)], "2.weight": [Replicate(), Shard(1)]
        },
    )  # fmt: skip
    model, optimizer = built(mlp, adam, warm=False)
    step = spmd.compile(parallel_mode=mode, batch=batch)(train_step(mean_loss))
    for x in data:
        # Ranks of one row of the mesh pass the same part.
        local = x.chunk(2)[mesh.get_coordinate()[0]]
        step(model, optimizer, local if batch == "local" else x)
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert model[0].weight.to_local().shape == (8, 10)
    assert_same(state_of(model, optimizer), single(mlp, adam, mean_loss, data), **FEW_STEPS)
    if batch == "local":
        told = text_of(step, model, optimizer, data[0].chunk(2)[0] + dist.get_rank())
        assert "[input-batch-dim]" in told


@pytest.mark.parametrize("batch", ["local", "global"])
def test_expand_mode_on_two_axes(on_ranks: Ranks, batch: str) -> None:
    on_ranks(expand_on_a_2d_mesh, batch, num_ranks=4)


def on_half_the_ranks() -> Any:
    """Two meshes of two ranks each train two models at once."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mode = spmd.DataParallel("fully_shard", mesh=rows["b"])
    step = spmd.compile(parallel_mode=mode)(train_step(mean_loss))
    row, column = rows.get_coordinate()
    data = [x + row for x in batches(3 + row)]
    model, optimizer = built(mlp, adam, warm=False)
    for x in data:
        step(model, optimizer, x.chunk(2)[column])
    assert_same(state_of(model, optimizer), single(mlp, adam, mean_loss, data), **FEW_STEPS)


def test_a_mesh_of_some_of_the_ranks(on_ranks: Ranks) -> None:
    on_ranks(on_half_the_ranks, num_ranks=4)


def wrong_meshes() -> list[str]:
    x = part(batches(1)[0])
    told = []
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    for given in ({"dp": 3}, mesh):
        step = spmd.compile(parallel_mode=spmd.DataParallel(mesh=given))(train_step(mean_loss))
        told.append(text_of(step, *built(mlp, sgd, warm=False), x))
    return told


def test_meshes_that_do_not_fit(on_ranks: Ranks) -> None:
    told = on_ranks(wrong_meshes)
    assert all("[mesh-size]" in t[0] for t in told)
    assert "[not-on-mesh]" in told[1][1]
    assert told[0][1] == "NoneType: None"


def test_without_a_process_group() -> None:
    with pytest.raises(spmd.errors.UsageError, match="torchrun.*no-process-group"):
        spmd.compile()(train_step(mean_loss))(*built(mlp, sgd, warm=False), batches(1)[0])


def write_inputs(batch: str) -> None:
    """What the step writes into its arguments lands in the caller's tensors."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = train_step(mean_loss)(model, optimizer, x)
        x.mul_(2).sub_(x.mean())
        return loss

    model, optimizer = built(mlp, sgd, warm=False)
    x = batches(1)[0]
    mine = part(x).clone() if batch == "local" else x.clone()
    spmd.compile(batch=batch)(step)(model, optimizer, mine)
    expected = 2 * x - (2 * x).mean()
    torch.testing.assert_close(mine, part(expected) if batch == "local" else expected)


@pytest.mark.parametrize("batch", ["local", "global"])
def test_arguments_written_in_place(on_ranks: Ranks, batch: str) -> None:
    on_ranks(write_inputs, batch)
