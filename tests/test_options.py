"""Meshes and ranges of a run's settings."""

import pytest

from spmd_verify.errors import UsageError
from spmd_verify.options import MeshSpec, Options, parse_mesh


def test_a_bare_number_takes_its_axis_from_the_style() -> None:
    mesh = parse_mesh("4")

    assert mesh.num_ranks == 4
    assert mesh.resolve("replicate") == {"dp": 4}
    assert mesh.text("my_tp") == "tp=4"


def test_named_axes_keep_their_order() -> None:
    mesh = parse_mesh("dp=2, tp=3")

    assert mesh == MeshSpec((("dp", 2), ("tp", 3)))
    assert mesh.num_ranks == 6
    assert mesh.text("replicate") == "dp=2,tp=3"


@pytest.mark.parametrize("text", ["", "0", "-1", "dp", "dp=", "=2", "dp=x", "2,tp=2", "dp=2,dp=2"])
def test_a_malformed_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="dp=2,tp=2") as caught:
        parse_mesh(text)

    assert caught.value.slug == "malformed-mesh"


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"dtype": "flot32"}, "unknown-dtype"),
        ({"runner": "threads"}, "unknown-runner"),
        ({"steps": 0}, "bad-number"),
        ({"seed": -1}, "bad-number"),
        ({"timeout_seconds": 0.0}, "bad-number"),
        ({"timeout_seconds": float("nan")}, "bad-number"),
        ({"max_ranks": 0}, "bad-number"),
        ({"mesh": parse_mesh("17")}, "mesh-too-large"),
        ({"mesh": parse_mesh("3"), "max_ranks": 2}, "mesh-too-large"),
        ({"reports": (("html", "x"),)}, "unknown-report-format"),
    ],
)
def test_a_value_out_of_range_is_refused(change: dict[str, object], slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        Options(("model.py",), **change).checked()  # type: ignore[arg-type]

    assert caught.value.slug == slug


def test_lockstep_allows_more_ranks() -> None:
    options = Options(("model.py",), runner="lockstep", mesh=parse_mesh("64"))

    assert options.checked() is options
    assert options.rank_limit == 4096
