"""A loaded case builds the same model, batches and steps wherever it is loaded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spmd_verify.cases.case import LoadedCase, load_case
from spmd_verify.errors import CaseError, ReferenceRunError

CaseWriter = Callable[..., str]

MODEL = """
class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x, y=None):
        return self.fc(x) * self.scale
"""
INPUTS = "def get_inputs():\n    return [torch.randn(8, 4)]\n"


def _train(case: LoadedCase, steps: int = 2) -> list[float]:
    """Return the losses of a few steps."""
    model = case.build_model()
    optimizer = case.optimizer(model)
    losses = []
    for step in range(steps):
        case.seed_step(step)
        losses.append(float(case.step(model, optimizer, case.batch(step)).detach()))
    return losses


def test_two_loads_give_the_same_training(write_case: CaseWriter) -> None:
    path = write_case("NOISE = torch.randn(3)\n" + MODEL + INPUTS)
    first = _train(load_case(path, seed=5))
    torch.manual_seed(99)

    assert _train(load_case(path, seed=5)) == first
    assert _train(load_case(path, seed=6)) != first


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
def test_parameters_buffers_and_floating_inputs_have_the_cases_dtype(
    write_case: CaseWriter, name: str
) -> None:
    case = load_case(write_case(MODEL + INPUTS), dtype=name)
    model = case.build_model()
    dtype = getattr(torch, name)

    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert (model.scale.dtype, model.count.dtype) == (dtype, torch.long)
    assert case.batch(0)[0].dtype == dtype


def test_casting_keeps_ties_and_complex_numbers(write_case: CaseWriter) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.c = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x):
        return self.b(self.a(x))
"""
    model = load_case(write_case(text + INPUTS), dtype="float64").build_model()

    assert model.a.weight is model.b.weight
    assert model.c.dtype == torch.complex128


def test_a_lazy_model_gets_its_shapes(write_case: CaseWriter) -> None:
    text = "def get_model():\n    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())\n"
    model = load_case(write_case(text + INPUTS), dtype="float64").build_model()

    assert model[0].weight.shape == (3, 4)
    assert model[0].weight.dtype == torch.float64
    assert model.training
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize(
    "init", ["[]", "[4]", "[[4], {}]", "[[], {'width': 4}]", "{'width': 4}", "4", "None"]
)
def test_constructor_arguments_come_in_any_of_the_usual_shapes(
    write_case: CaseWriter, init: str
) -> None:
    text = MODEL + INPUTS + f"def get_init_inputs():\n    return {init}\n"

    assert load_case(write_case(text)).build_model().fc.in_features == 4


@pytest.mark.parametrize(
    ("inputs", "targets", "paths", "kinds"),
    [
        ("torch.zeros(8, 4)", None, ["x"], "tuple"),
        ("[torch.zeros(8, 4), torch.zeros(8)]", None, ["x", "y"], "tuple"),
        ("torch.zeros(8, 4)", "torch.zeros(8)", ["x", "targets"], "tuple"),
        (
            "(torch.zeros(8, 4),)",
            "[torch.zeros(8), torch.zeros(8)]",
            ["x", "targets.0", "targets.1"],
            "tuple",
        ),
        ("torch.zeros(8, 4)", "{'a': torch.zeros(8)}", ["x", "targets.a"], "tuple"),
        ("{'x': torch.zeros(8, 4)}", None, ["x"], "dict"),
        ("{'x': torch.zeros(8, 4)}", "torch.zeros(8)", ["x", "targets"], "dict"),
        ("{'x': torch.zeros(8, 4)}", "{'a': torch.zeros(8)}", ["x", "targets.a"], "dict"),
        ("([torch.zeros(8, 4)], {'y': torch.zeros(8)})", None, ["x", "y"], "tuple"),
        ("[torch.zeros(8, 4), {'m': [torch.zeros(8)]}]", None, ["x", "y.m.0"], "tuple"),
        ("[torch.zeros(8, 4)] * 3", None, ["x", "y", "inputs.2"], "tuple"),
    ],
)
def test_batches_and_argument_paths(
    write_case: CaseWriter, inputs: str, targets: str | None, paths: list[str], kinds: str
) -> None:
    text = MODEL + f"def get_inputs():\n    return {inputs}\n"
    if targets:
        text += f"def get_targets():\n    return {targets}\n"
    case = load_case(write_case(text))

    assert case.leaf_paths == paths
    assert type(case.batch(0)).__name__ == kinds
    assert set(case.input_batch_dims) == set(paths)
    assert all(dim == 0 for dim in case.input_batch_dims.values())


def test_a_batch_is_taken_apart_as_it_was_put_together(write_case: CaseWriter) -> None:
    text = MODEL + (
        "def get_inputs():\n    return ([torch.zeros(8, 4)], {'y': torch.ones(8)})\n"
        "def get_targets():\n    return {'a': torch.ones(8), 'b': torch.zeros(8)}\n"
    )
    case = load_case(write_case(text))

    args, kwargs, targets = case.split(case.batch(0))

    assert [arg.shape for arg in args] == [(8, 4)]
    assert (list(kwargs), list(targets)) == (["y"], ["a", "b"])
    assert sorted(case.targets(0)) == ["a", "b"]


def test_only_tensors_with_the_batch_on_dim_0_are_sharded_by_default(
    write_case: CaseWriter,
) -> None:
    text = MODEL + (
        "def get_inputs():\n"
        "    return {'x': torch.zeros(8, 4), 'mask': torch.zeros(4, 4), 'p': torch.tensor(0.1),"
        " 'flag': True}\n"
    )
    case = load_case(write_case(text))

    assert case.input_batch_dims == {"x": 0, "mask": None, "p": None}
    assert case.batch_dims == [0, None, None, None]


def test_input_sharding_names_dims_for_axes_or_for_the_data_axes(write_case: CaseWriter) -> None:
    text = MODEL + (
        "def get_inputs():\n"
        "    return {'x': torch.zeros(5, 8), 'y': [torch.zeros(8), torch.zeros(8)]}\n"
        "def input_sharding():\n    return {'x': {'dp': 1, 'tp': 0}, 'y': 0}\n"
        "def parallelize_mine(model, mesh): ...\n"
        "def input_sharding_mine():\n    return {'x': None}\n"
    )
    case = load_case(write_case(text))

    assert case.input_batch_dims == {"x": 1, "y.0": 0, "y.1": 0}
    assert case.batch_size == 8
    assert case.sharding(("dp", "tp"))["x"] == {"dp": 1, "tp": 0}
    assert case.sharding(("dp", "tp"))["y.0"] == {"dp": 0, "tp": None}
    assert case.sharding(("dp",), "mine")["x"] == {"dp": None}


def test_input_sharding_of_an_unknown_argument_is_refused(write_case: CaseWriter) -> None:
    text = MODEL + INPUTS + "def input_sharding():\n    return {'z': 0}\n"

    with pytest.raises(CaseError, match="Got 'z'; valid: x") as caught:
        _ = load_case(write_case(text)).input_batch_dims

    assert caught.value.slug == "unknown-input"


def test_one_batch_is_reused_and_a_copy_each_time(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL + INPUTS))
    first = case.batch(0)[0]
    expected = first.clone()
    first.zero_()

    assert torch.equal(case.batch(0)[0], expected)
    assert torch.equal(case.batch(2)[0], expected)


@pytest.mark.parametrize(
    "inputs",
    [
        "def get_inputs(step):\n    return torch.randn(8, 4) + step\n",
        "def get_inputs():\n    while True:\n        yield torch.randn(8, 4)\n",
    ],
)
def test_batches_per_step_are_the_same_in_any_order_of_asking(
    write_case: CaseWriter, inputs: str
) -> None:
    path = write_case(MODEL + inputs)
    forward, backward = load_case(path), load_case(path)
    expected = [forward.batch(step)[0] for step in range(3)]
    torch.manual_seed(3)
    actual = [backward.batch(step)[0] for step in (2, 1, 0)][::-1]

    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert not torch.equal(expected[0], expected[1])


def test_the_hooks_get_step_and_seed_when_they_name_them(write_case: CaseWriter) -> None:
    text = (
        MODEL + "def get_inputs(seed, step=0):\n    return torch.full((8, 4), seed + 10.0 * step)"
    )
    case = load_case(write_case(text), seed=3)

    assert float(case.batch(2)[0][0, 0]) == 23.0


def test_drawing_a_batch_leaves_the_random_stream_alone(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL + INPUTS))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    case.batch(0)

    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("def get_inputs():\n    yield torch.zeros(8, 4)\n", "inputs-ended"),
        (
            "def get_inputs(step):\n    return [torch.zeros(8, 4)] * (step + 1)\n",
            "changing-batches",
        ),
        ("def get_inputs():\n    raise KeyError('k')\n", "hook-raised"),
    ],
)
def test_batches_that_cannot_be_had_are_refused(
    write_case: CaseWriter, text: str, slug: str
) -> None:
    with pytest.raises(CaseError) as caught:
        load_case(write_case(MODEL + text)).batch(1)

    assert caught.value.slug == slug


def test_the_optimizer_hook_takes_parameters_or_the_model(write_case: CaseWriter) -> None:
    by_params = "def get_optimizer(params):\n    return torch.optim.SGD(params, lr=0.5)\n"
    by_model = "def get_optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.5)\n"
    for hook in (by_params, by_model):
        case = load_case(write_case(MODEL + INPUTS + hook))
        optimizer = case.optimizer(case.build_model())
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_list_of_optimizers_is_stepped_whole(write_case: CaseWriter) -> None:
    hook = "def get_optimizer(params):\n    return [torch.optim.SGD([p], lr=0.1) for p in params]\n"
    case = load_case(write_case(MODEL + INPUTS + hook))
    model = case.build_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    case.step(model, case.optimizer(model), case.batch(0))

    pairs = zip(before, model.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)


def test_the_probe_override_gives_plain_sgd(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL + INPUTS), overrides={"optimizer": "sgd"})

    assert type(case.optimizer(case.build_model())) is torch.optim.SGD


@pytest.mark.parametrize(
    ("made", "slug", "says"),
    [
        ("3", "not-an-optimizer", "Got int"),
        ("torch.optim.LBFGS(params)", "optimizer-refused", "Got LBFGS"),
        ("torch.optim.SparseAdam(params)", "optimizer-refused", "Got SparseAdam"),
        ("[torch.optim.SGD(params, lr=1.0), None]", "not-an-optimizer", "Got NoneType"),
    ],
)
def test_an_optimizer_outside_the_rules_is_refused_by_name(
    write_case: CaseWriter, made: str, slug: str, says: str
) -> None:
    case = load_case(
        write_case(MODEL + INPUTS + f"def get_optimizer(params):\n    return {made}\n")
    )

    with pytest.raises(CaseError, match=says) as caught:
        case.optimizer(case.build_model())

    assert caught.value.slug == slug


@pytest.mark.parametrize(
    ("text", "slug", "says"),
    [
        ("def loss(output):\n    return output\n", "loss-not-scalar", r"shape \(8, 3\)"),
        ("def loss(output):\n    return 1.0\n", "loss-not-scalar", "float"),
        ("def loss(output):\n    return output.sum().detach()\n", "loss-without-gradient", "grad"),
        ("def loss(output, targets):\n    return output\n", "loss-needs-targets", "get_targets"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(
    write_case: CaseWriter, text: str, slug: str, says: str
) -> None:
    case = load_case(write_case(MODEL + INPUTS + text))
    model = case.build_model()

    with pytest.raises(CaseError, match=says) as caught:
        case.step(model, case.optimizer(model), case.batch(0))

    assert caught.value.slug == slug


def test_loss_is_called_with_the_output_alone_where_there_are_no_targets(
    write_case: CaseWriter,
) -> None:
    text = "def loss(output, targets=None):\n    assert targets is None\n    return output.sum()\n"

    assert len(_train(load_case(write_case(MODEL + INPUTS + text)))) == 2


def test_a_forward_that_raises_says_so_before_any_parallel_style(write_case: CaseWriter) -> None:
    path = write_case(MODEL.replace("self.fc(x)", "self.fc(x.T)") + INPUTS)
    case = load_case(path)
    model = case.build_model()

    says = "before any parallel style"
    with pytest.raises(ReferenceRunError, match=says) as caught, case.on_one_device():
        case.step(model, case.optimizer(model), case.batch(0))

    assert caught.value.slug == "forward-raised"
    assert caught.value.detail.splitlines()[1].strip().startswith(f'File "{path}"')


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        ("x", r"gives 2 in order, forward takes \(x\): too many .* come from get_targets\(\)"),
        ("x, y, z", r"gives 2 in order, forward takes \(x, y, z\): missing .*'z'. Return what"),
    ],
)
def test_inputs_that_forward_does_not_take_are_told_with_the_remedy(
    write_case: CaseWriter, forward: str, says: str
) -> None:
    inputs = "def get_inputs():\n    return torch.randn(8, 4), torch.randint(0, 2, (8,))\n"
    case = load_case(write_case(MODEL.replace("x, y=None", forward) + inputs))
    model = case.build_model()

    with pytest.raises(ReferenceRunError, match=says), case.on_one_device():
        case.step(model, case.optimizer(model), case.batch(0))


def test_the_users_step_replaces_the_whole_step(write_case: CaseWriter) -> None:
    text = (
        MODEL
        + INPUTS
        + (
            "def get_targets():\n    return torch.ones(8, 3)\n"
            "def step(model, optimizer, batch):\n    x, y = batch\n"
            "    return (model(x) - y).sum() * 0 + 7\n"
        )
    )

    assert _train(load_case(write_case(text))) == [7.0, 7.0]


def test_factory_calls_of_a_step_follow_the_cases_dtype(write_case: CaseWriter) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 3, batch_first=True)

    def forward(self, x):
        state = torch.zeros(1, x.shape[0], 3)
        assert torch.arange(3).dtype == torch.long
        assert torch.zeros(1, dtype=torch.float32).dtype == torch.float32
        return self.gru(x[:, None], state)[0]
"""
    case = load_case(write_case(text + INPUTS), dtype="float64")
    default = torch.get_default_dtype()

    assert len(_train(case)) == 2
    assert torch.get_default_dtype() == default


def test_the_hash_follows_the_file(write_case: CaseWriter) -> None:
    first = load_case(write_case(MODEL + INPUTS)).source_hash
    second = load_case(write_case(MODEL + INPUTS + "# changed\n")).source_hash

    assert len(first) == 64
    assert first != second


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("types.SimpleNamespace(loss=h.sum())", "own"),
        ("{'loss': h.sum(), 'logits': h}", "own"),
        ("h.sum()", "own"),
        ("(h, h.sum())", "own"),
        ("(h.mean(), h.sum())", "projected"),
        ("h", "projected"),
        ("{'a': [h, h * 2], 'n': 3}", "projected"),
        ("Output(h)", "projected"),
        ("h.to(torch.complex64)", "projected"),
    ],
)
def test_the_default_loss_is_the_outputs_own_or_a_projection(
    write_case: CaseWriter, returned: str, expected: str
) -> None:
    text = f"""
import dataclasses, types

@dataclasses.dataclass
class Output:
    h: torch.Tensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = self.fc(x)
        return {returned}
"""
    case = load_case(write_case(text + INPUTS))
    model = case.build_model()
    output = model(*case.split(case.batch(0))[0])

    assert bool(case.notes(output)) == (expected == "projected")
    assert case.loss(output).requires_grad
    if expected == "own":
        assert torch.equal(case.loss(output), model.fc(case.batch(0)[0]).sum())


def test_the_projection_of_parts_averages_to_that_of_the_whole(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL + INPUTS), dtype="float64")
    output = torch.randn(8, 3, dtype=torch.float64)
    parts = [case.loss(part, batch_size=4) for part in output.chunk(2)]

    torch.testing.assert_close(sum(parts) / 2, case.loss(output))
    assert not torch.equal(case.loss(output), case.loss(output.flip(1)))


def test_an_output_without_floating_tensors_has_no_default_loss(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL + INPUTS))

    with pytest.raises(ReferenceRunError) as caught:
        case.loss([torch.arange(3)])

    assert caught.value.slug == "no-default-loss"


def test_the_projection_is_the_same_number_in_every_dtype(write_case: CaseWriter) -> None:
    case: Any = load_case(write_case(MODEL + INPUTS))
    ones = torch.ones(1, 64, dtype=torch.float64)

    assert float(case.loss(ones, batch_size=1)) == float(case.loss(ones.float(), batch_size=1))


def test_a_module_that_is_no_class_gives_forwards_parameters(write_case: CaseWriter) -> None:
    case = load_case(write_case("def get_model():\n    return nn.Linear(4, 3)\n" + INPUTS))

    assert list(case.forward_parameters) == ["input"]
    assert isinstance(case.build_model(), nn.Linear)
