"""What a selection of styles names."""

import pytest

from spmd_verify.errors import CaseError, UsageError
from spmd_verify.style_ids import ENGINE, axis_name, bare_mesh, check_user_styles, select

TORCH = ("ddp", "fsdp2", "hsdp")


def test_the_default_is_the_engine_and_the_files_own_styles() -> None:
    assert select([]) == ENGINE
    assert select([], ["mine"]) == (*ENGINE, "mine")


def test_ids_groups_globs_and_user_styles_keep_the_tables_order() -> None:
    assert select(["default", "replicate"]) == ("replicate", "default")
    assert select(["f*"]) == ("fully_shard", "fsdp2")
    assert select(["torch"]) == TORCH
    assert select(["user"], ["b", "a"]) == ("b", "a")
    assert select(["all"], ["mine"]) == (*ENGINE, *TORCH, "mine")
    assert select(["mi*"], ["mine", "other"]) == ("mine",)


def test_an_unknown_style_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'replicat'.*did you mean 'replicate'\?.*") as caught:
        select(["replicat"])

    assert caught.value.slug == "unknown-style"


@pytest.mark.parametrize("pattern", ["zero1", "fsdp2+tp", "tensor_parallel"])
def test_a_planned_style_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        select([pattern])

    assert caught.value.slug == "style-not-yet"


@pytest.mark.parametrize(
    ("style", "axis"),
    [
        ("replicate", "dp"),
        ("fsdp2", "fsdp"),
        ("my_tp", "tp"),
        ("wrapped", "dp"),
        ("pp+dp", "pp"),
        ("a-ep-b", "ep"),
    ],
)
def test_the_axis_of_a_bare_mesh_is_a_whole_token_of_the_name(style: str, axis: str) -> None:
    assert axis_name(style) == axis


@pytest.mark.parametrize(
    ("style", "ranks", "mesh"),
    [
        ("ddp", 6, {"dp": 6}),
        ("ddp", 1, {"dp": 1}),
        ("hsdp", 4, {"replicate": 2, "shard": 2}),
        ("hsdp", 8, {"replicate": 2, "shard": 4}),
        ("hsdp", 12, {"replicate": 3, "shard": 4}),
        ("hsdp+tp", 8, {"replicate": 2, "shard": 2, "tp": 2}),
        ("hsdp+tp", 12, {"replicate": 2, "shard": 2, "tp": 3}),
        ("hsdp", 2, {"replicate": 2}),
        ("hsdp", 5, {"replicate": 5}),
        ("mine", 4, {"dp": 4}),
    ],
)
def test_a_bare_number_becomes_the_most_even_mesh(
    style: str, ranks: int, mesh: dict[str, int]
) -> None:
    assert bare_mesh(style, ranks) == mesh


@pytest.mark.parametrize("name", ["replicate", "ddp", "tensor_parallel", "engine"])
def test_a_user_style_named_like_a_built_in_one_is_refused(name: str) -> None:
    with pytest.raises(CaseError) as caught:
        check_user_styles([name], "model.py")

    assert caught.value.slug == "style-name-taken"
    assert repr(name) in str(caught.value)


def test_a_user_style_may_be_called_user() -> None:
    check_user_styles(["user", "mine"], "model.py")
