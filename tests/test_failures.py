"""Which rank is the cause of a broken job, told from its followers."""

from __future__ import annotations

import sysconfig

import msgspec
import pytest

from spmd_verify.runner.failures import (
    Frame,
    RankEnd,
    diagnose,
    is_follower,
    is_in_collective,
    is_parallel_style,
    is_refusal,
    parse_stack,
    user_frame,
)
from spmd_verify.runner.messages import Raised, Refused
from spmd_verify.user_code import is_user_file

SITE = sysconfig.get_paths()["purelib"]
USER = Frame("/home/me/model.py", 12, "forward")
WAITING = Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 3000, "all_reduce")


def raised(message: str, kind: str = "RuntimeError") -> Raised:
    return Raised(0, kind, message, None, "", "/home/me/model.py:12", "Traceback ...")


def diagnosis(*ends: RankEnd, is_timeout: bool = False):
    return diagnose(ends, seconds=4.1, is_timeout=is_timeout, log_base="/logs/rank")


def test_first_event_that_is_no_lost_connection_is_the_cause():
    failure = diagnosis(
        RankEnd(0, 0, event=raised("Connection closed by peer [127.0.0.1]:4")),
        RankEnd(1, 1, event=raised("size of tensor a must match")),
        RankEnd(2, 3),
    )

    assert (failure.kind, failure.ranks, failure.followers) == ("raised", [1], [0, 2])
    assert "Ranks 0, 2 stopped because of it" in failure.message


def test_ranks_with_the_same_error_are_named_once():
    failure = diagnosis(RankEnd(0, 0, event=raised("bad")), RankEnd(1, 1, event=raised("bad")))

    assert failure.ranks == [0, 1]
    assert failure.message.startswith("Ranks 0, 1 of 2 raised RuntimeError at /home/me/model.py:12")


def test_a_death_beats_the_lost_connection_it_caused():
    failure = diagnosis(
        RankEnd(0, 0, event=raised("Connection reset by peer")),
        RankEnd(1, 1, exit_code=-9, last_note="step 1"),
    )

    assert (failure.kind, failure.ranks) == ("died", [1])
    assert "killed by signal 9 (SIGKILL) after 4.1 s during step 1" in failure.message


def test_lost_connections_alone_are_reported_as_they_are():
    failure = diagnosis(RankEnd(0, 0, event=raised("Connection reset by peer")), RankEnd(1, 2))

    assert (failure.kind, failure.ranks) == ("raised", [0])


def test_abort_of_gloo_is_translated():
    log = "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 1000 vs 8.\nx"
    failure = diagnosis(RankEnd(0, 0, exit_code=-6, log_tail=f"gloo::EnforceNotMet\n{log}"))

    assert "collective's size or dtype (op.preamble.length <= op.nbytes. 1000 vs 8)" in (
        failure.message
    )


def test_the_rank_that_is_in_no_collective_hangs():
    failure = diagnosis(
        RankEnd(0, 2, stack=[WAITING, USER]),
        RankEnd(1, 2, stack=[Frame("/x/model.py", 7, "spin"), USER], last_note="step 2"),
        is_timeout=True,
    )

    assert (failure.kind, failure.ranks, failure.followers) == ("hung", [1], [0])
    assert "rank 1 in step 2 is at /x/model.py:7 in spin" in failure.message


def test_when_all_wait_the_ranks_disagree():
    failure = diagnosis(
        RankEnd(0, 2, stack=[WAITING, USER]), RankEnd(1, 2, stack=[WAITING, USER]), is_timeout=True
    )

    assert failure.ranks == [0, 1]
    assert "do not agree on the next one" in failure.message


def test_a_rank_waiting_for_a_finished_one_hangs():
    failure = diagnosis(
        RankEnd(0, 0, is_done=True), RankEnd(1, 2, stack=[WAITING, USER]), is_timeout=True
    )

    assert (failure.ranks, failure.followers) == ([1], [])


def test_a_refusal_is_one():
    failure = diagnosis(
        RankEnd(0, 1, event=raised("Connection reset by peer")),
        RankEnd(1, 0, event=Refused(0, "no rule", "capture")),
    )

    assert (failure.kind, failure.reason, failure.slug) == ("refused", "no rule", "capture")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (raised("[x.cc:1] Timed out waiting 5000ms for recv operation"), True),
        (raised("anything", kind="DistNetworkError"), True),
        (raised("mat1 and mat2 shapes cannot be multiplied"), False),
        (raised("Connection reset by peer", kind="ValueError"), False),
    ],
)
def test_followers_are_known_by_what_they_say(event: Raised, expected: bool):
    assert is_follower(event) is expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/model.py", True),
        (f"{SITE}/transformers/models/gpt2/modeling_gpt2.py", True),
        (f"{SITE}/torch/nn/modules/linear.py", False),
        (sysconfig.get_paths()["stdlib"] + "/threading.py", False),
        ("<string>", False),
        (__import__("spmd_verify").__file__, False),
    ],
)
def test_user_files_are_neither_torch_nor_python_nor_ours(path: str, expected: bool):
    assert is_user_file(path) is expected


def test_innermost_user_frame_is_taken():
    assert user_frame([WAITING, USER, Frame("/x/main.py", 1, "main")]) == USER
    assert user_frame([WAITING]) is None


def test_a_collective_below_the_users_code_counts_as_waiting():
    assert is_in_collective([WAITING, USER])
    assert not is_in_collective([USER, WAITING])
    assert not is_in_collective([])


def test_the_stack_of_the_asked_thread_is_read():
    text = (
        "Thread 0x00007f0000000001 (most recent call first):\n"
        '  File "/x/lifeline.py", line 3 in wait\n'
        "\n"
        "Current thread 0x00007f0000000002 (most recent call first):\n"
        '  File "/x/model.py", line 7 in spin\n'
        '  File "/x/model.py", line 9 in forward\n'
    )

    assert parse_stack(text, 0x7F0000000002) == [
        Frame("/x/model.py", 7, "spin"),
        Frame("/x/model.py", 9, "forward"),
    ]


def torchs(message: str = "FSDP needs a device") -> Raised:
    return msgspec.structs.replace(raised(message), is_torchs=True)


BUILDING = "building the free run"


def test_what_torch_refuses_on_every_rank_before_the_first_step_is_a_refusal() -> None:
    found = diagnosis(
        RankEnd(0, 0, event=torchs(), last_note=BUILDING),
        RankEnd(1, 1, event=torchs(), last_note=BUILDING),
    )

    assert (found.kind, found.ranks, found.slug) == ("refused", [0, 1], "torch-refuses")
    assert "FSDP needs a device" in found.reason


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (torchs(), None, BUILDING),  # on one rank only
        (torchs(), torchs("another"), BUILDING),  # not the same
        (raised("bad"), raised("bad"), BUILDING),  # the user's own, or another part of torch
        (torchs(), torchs(), "step 1 of the free run"),  # it has run before
    ],
)
def test_anything_else_that_is_raised_stays_an_error(
    first: Raised, second: Raised | None, note: str
) -> None:
    found = diagnosis(
        RankEnd(0, 0, event=first, last_note=note), RankEnd(1, 1, event=second, last_note=note)
    )

    assert found.kind == "raised"


def test_what_torch_raises_below_a_style_of_the_file_is_the_files_error() -> None:
    torchs_own = Frame(f"{SITE}/torch/distributed/tensor/_api.py", 5, "distribute_tensor")
    caller = Frame("/home/me/model.py", 9, "parallelize_mine")
    built_in = Frame("/srv/spmd_verify/styles/torch_base.py", 7, "step")
    of_the_file = Frame("/srv/spmd_verify/styles/user.py", 7, "apply")

    assert is_refusal([torchs_own, built_in])
    assert not is_refusal([torchs_own, caller, of_the_file])
    assert not is_refusal([torchs_own, of_the_file])  # from a hook in backward: no line of theirs
    assert not is_refusal([caller, built_in])  # `x.placements` of a plain tensor, in their code
    assert not is_refusal([])


@pytest.mark.parametrize(
    ("path", "is_style"),
    [
        ("torch/distributed/fsdp/_fully_shard/_fsdp_state.py", True),
        ("torch/distributed/tensor/_api.py", True),
        ("torch/distributed/pipelining/stage.py", True),
        ("torch/distributed/distributed_c10d.py", False),
        ("torch/nn/functional.py", False),
    ],
)
def test_collectives_are_no_parallel_style(path: str, is_style: bool) -> None:
    assert is_parallel_style(f"{SITE}/{path}") is is_style
