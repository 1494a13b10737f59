"""What the failing cells of a sweep have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spmd_verify.cli import main
from spmd_verify.conditions import condition
from spmd_verify.record import Cell


def _cell(style: str, mesh: str, verdict: str) -> Cell:
    ranks = 1
    for part in mesh.split(","):
        ranks *= int(part.partition("=")[2])
    return Cell(
        case="model.py", style=style, mesh=mesh, dtype="float32", world_size=ranks,
        runner="processes", verdict=verdict,
    )  # fmt: skip


def _grid(styles: list[str], meshes: list[str], fails: object) -> list[Cell]:
    """Return a cell per style and mesh; `fails(style, sizes)` says which differ."""
    cells = []
    for style in styles:
        for mesh in meshes:
            sizes = {a: int(n) for a, _, n in (part.partition("=") for part in mesh.split(","))}
            verdict = "mismatch" if fails(style, sizes) else "rounding"  # type: ignore[operator]
            cells.append(_cell(style, mesh, verdict))
    return cells


MESHES = ["dp=2,tp=1", "dp=1,tp=2", "dp=2,tp=2", "dp=1,tp=4"]


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda s, m: m["tp"] >= 2, "fails iff tp >= 2 (9 of 12 cells judged)"),
        (
            lambda s, m: m["tp"] >= 2 and s == "my_sp",
            "fails iff tp >= 2 and sequence parallel (3 of 12 cells judged)",
        ),
        (lambda s, m: s == "mine", "fails iff style mine (4 of 12 cells judged)"),
        (
            lambda s, m: m["dp"] >= 2 and m["tp"] >= 2,
            "fails iff dp >= 2 and tp >= 2 (3 of 12 cells judged)",
        ),
        (lambda s, m: m["tp"] == 2, "fails iff tp = 2 (6 of 12 cells judged)"),
        (
            lambda s, m: m["tp"] == 4 or s == "mine",
            "fails iff tp >= 4 or style mine (6 of 12 cells judged)",
        ),
        (lambda s, m: True, "fails in all of 12 cells judged"),
    ],
)
def test_the_shortest_condition_is_said(fails: object, said: str) -> None:
    assert condition(_grid(["my_sp", "my_tp", "mine"], MESHES, fails)) == said


def test_an_odd_number_of_ranks() -> None:
    cells = _grid(["ddp", "fsdp2"], ["dp=2", "dp=3", "dp=4", "dp=5"], lambda s, m: m["dp"] % 2)

    assert condition(cells) == "fails iff dp odd (4 of 8 cells judged)"


def test_what_nothing_short_tells_apart_is_counted() -> None:
    wrong = {("my_sp", 2, 1), ("my_tp", 1, 2), ("mine", 1, 4)}
    cells = _grid(["my_sp", "my_tp", "mine"], MESHES, lambda s, m: (s, m["dp"], m["tp"]) in wrong)

    assert condition(cells) == (
        "fails in 3 of 12 cells judged; nothing short tells them from the others"
    )


def test_cells_without_a_verdict_do_not_count() -> None:
    cells = [
        _cell("ddp", "dp=2", "rounding"),
        _cell("ddp", "dp=3", "unsupported"),
        _cell("ddp", "dp=4", "mismatch"),
    ]

    assert condition(cells) == "fails iff dp >= 4 (1 of 2 cells judged)"
    assert condition(cells[:2]) is None


BROKEN_OVER_TP = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x).square().mean()


def get_inputs():
    return torch.randn(4, 4)


def parallelize_mine(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: _reduce(p, mesh))


def parallelize_other(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: _reduce(p, mesh["dp"]))


def _reduce(parameter, mesh):
    if mesh.ndim == 1:
        torch.distributed.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad /= mesh.size()
        return
    for axis in ("dp", "tp"):
        torch.distributed.all_reduce(parameter.grad, group=mesh.get_group(axis))
    parameter.grad /= mesh.size(0)
"""


@pytest.mark.dist
def test_a_sweep_says_when_a_style_fails(
    write_case: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = "--mesh-sweep 2x1,1x2 --mesh-sweep dp=2,tp=2 --styles user --no-probe --steps 1"

    assert main([str(write_case(BROKEN_OVER_TP)), *sweep.split()]) == 1
    assert "fails iff tp >= 2 and style mine (2 of 6 cells judged)" in capsys.readouterr().out
