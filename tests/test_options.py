"""Meshes and ranges of a run's settings."""

import pytest

from spmd_verify.errors import UsageError
from spmd_verify.mesh_spec import MeshSpec, parse_mesh, parse_sweep
from spmd_verify.options import Options


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
        ({"reports": (("pdf", "x"),)}, "unknown-report-format"),
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


@pytest.mark.parametrize(
    ("text", "style", "meshes"),
    [
        ("2,4", "ddp", [{"dp": 2}, {"dp": 4}]),
        ("2x2", "fsdp2+tp", [{"dp": 2, "tp": 2}]),
        ("2x2,4x2", "mine", [{"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}]),
        ("2x3", "my_pp_dp", [{"pp": 2, "dp": 3}]),
        ("2x2x2", "hsdp+tp", [{"replicate": 2, "shard": 2, "tp": 2}]),
        ("2x2", "ddp", [{"dp": 2, "tp": 2}]),
        ("dp=2,tp=2", "mine", [{"dp": 2, "tp": 2}]),
    ],
)
def test_a_sweep_is_meshes_by_commas_or_one_with_names(text, style, meshes) -> None:
    assert [mesh.resolve(style) for mesh in parse_sweep(text)] == meshes


def test_a_wrong_sweep_is_named_by_its_own_flag() -> None:
    with pytest.raises(UsageError, match=r"--mesh-sweep '2y2'"):
        parse_sweep("4,2y2")
