"""What is stored can be read back, in parts, whatever its dtype."""

from pathlib import Path

import pytest
import torch
from judging import Bench
from judging_cases import make_case
from torch import Tensor, nn

from spmd_verify.errors import InternalError
from spmd_verify.layouts import region
from spmd_verify.stored.store import Store


class Chunk:
    """A torch.chunk split of dim 0."""

    dim = 0


class Odd(nn.Module):
    """Complex and tied parameters, an integer buffer, a non-contiguous output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = (x.to(self.mix.dtype) @ self.mix).real.to(x.dtype)
        return self.second(torch.relu(self.first(y))).T


@pytest.fixture(scope="module", params=["float32", "float64", "bfloat16"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    case = make_case(
        "own",
        dtype=request.param,
        optimizer="sgd",
        steps=2,
        model=Odd,
        inputs=lambda: [torch.randn(8, 6)],
    )
    return Bench(case, tmp_path_factory.mktemp("store")).store


def test_everything_is_stored_with_its_dtype(store: Store) -> None:
    for entry in store.index.entries:
        value = store.expected(entry.step, entry.stage, entry.name)
        assert list(value.shape) == entry.shape
        assert str(value.dtype) == f"torch.{entry.dtype}"
        if value.is_floating_point() or value.is_complex():
            exact = store.exact("free", entry.step, entry.stage, entry.name)
            assert exact.shape == value.shape
            wide = torch.complex128 if value.is_complex() else torch.float64
            assert torch.allclose(exact.to(wide), value.to(wide), rtol=0.05, atol=0.05)


def test_parts_are_those_of_the_whole(store: Store) -> None:
    for name in ("mix", "first.weight", "first.bias"):
        whole = store.expected(1, "parameters", name)
        parts = [
            store.expected(1, "parameters", name, region(whole.shape, (Chunk(),), (4,), (i,)))
            for i in range(4)
        ]
        assert [len(part) for part in parts] == [2, 2, 2, 0]
        assert torch.equal(torch.cat(parts), whole)


def test_tied_names_are_stored_once_with_their_aliases(store: Store) -> None:
    assert "second.weight" not in store.names(0, "parameters")
    entry = store.entry(0, "parameters", "first.weight")
    assert entry is not None
    assert entry.aliases == ["second.weight"]


def test_the_state_of_a_step_is_the_anchor_of_the_next(store: Store) -> None:
    state = store.state(0)
    assert int(state["buffers"]["count"]) == 1
    assert set(state) == {"parameters", "buffers", "optimizer_state"}
    assert "first.weight.momentum_buffer" in state["optimizer_state"]


def test_floors_are_read_by_row(store: Store) -> None:
    rows = store.rows("noise", "free", 0, "gradients", "first.weight")
    assert rows is not None
    assert rows.shape == (6,)
    assert bool((rows > 0).all())
    assert store.rows("noise", "free", 0, "inputs", "x") is None


def test_no_half_written_file_is_left(store: Store) -> None:
    assert sorted(p.name for p in store.directory.iterdir()) == [
        "index.json",
        "step-0000.safetensors",
        "step-0001.safetensors",
    ]


def test_a_missing_store_is_an_internal_error(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="There is no reference"):
        Store(tmp_path / "nowhere")


def test_a_judged_candidate_with_complex_parameters_is_exact(tmp_path: Path) -> None:
    case = make_case(
        "own", dtype="float32", optimizer="sgd", model=Odd, inputs=lambda: [torch.randn(8, 6)]
    )
    found = Bench(case, tmp_path).judge(None)
    assert found.verdict == "exact"


def test_complex_parts_lie_where_the_kernels_of_torch_can_read_them(tmp_path: Path) -> None:
    case = make_case(
        "own", dtype="float64", optimizer="sgd", model=Odd, inputs=lambda: [torch.randn(8, 6)]
    )
    store = Bench(case, tmp_path).store
    found = [
        store.expected(step, stage, name, part)
        for step in range(2)
        for stage in ("parameters", "gradients")
        for name in store.names(step, stage)
        if (whole := store.expected(step, stage, name)).is_complex() and whole.dim()
        for i in range(len(whole))
        for part in [region(whole.shape, (Chunk(),), (len(whole),), (i,))]
    ]
    assert found
    assert not any(part.data_ptr() % 16 for part in found)
