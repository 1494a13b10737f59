"""The pool of workers: reuse, every way a rank can end, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spmd_verify import errors
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.pool import Pool

TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two ranks with a gloo group, shared by the tests of this file."""
    folder = tmp_path_factory.mktemp("pool")
    with Pool(2, work_dir=str(folder), log_dir=str(folder), backend="gloo") as shared:
        yield shared


def misbehave(pool: Pool, what: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Failure:
    """Let the last rank misbehave and return what the pool made of it."""
    answer = pool.run("runner_jobs:misbehave", what.encode(), timeout_seconds=timeout_seconds)
    assert isinstance(answer, Failure)
    return answer


def test_results_come_in_rank_order(pool: Pool) -> None:
    assert pool.run("runner_jobs:echo", b"x", timeout_seconds=TIMEOUT_SECONDS) == [b"x0", b"x1"]


def test_each_rank_can_get_its_own_payload(pool: Pool) -> None:
    answer = pool.run("runner_jobs:echo", [b"a", b"b"], timeout_seconds=TIMEOUT_SECONDS)

    assert answer == [b"a0", b"b1"]


def test_workers_are_reused_and_each_job_has_its_own_group(pool: Pool) -> None:
    pool.run("runner_jobs:echo", b"", timeout_seconds=TIMEOUT_SECONDS)
    before = pool.pids
    for _ in range(3):
        answer = pool.run("runner_jobs:all_reduce", b"", timeout_seconds=TIMEOUT_SECONDS)
        assert answer == [b"3.0", b"3.0"]

    assert pool.pids == before


def test_workers_compute_with_one_thread(pool: Pool) -> None:
    answer = pool.run("runner_jobs:threads", b"", timeout_seconds=TIMEOUT_SECONDS)

    assert answer == [b'[1,"1"]', b'[1,"1"]']


def test_groups_run_one_collective_at_a_time(pool: Pool) -> None:
    answer = pool.run("runner_jobs:group_threads", b"", timeout_seconds=TIMEOUT_SECONDS)

    assert answer == [b"[1,1]", b"[1,1]"]


def test_notes_reach_the_controller(pool: Pool) -> None:
    notes: list[tuple[int, str]] = []
    pool.run(
        "runner_jobs:all_reduce",
        b"",
        timeout_seconds=TIMEOUT_SECONDS,
        on_note=lambda rank, text: notes.append((rank, text)),
    )

    assert sorted(notes) == [(0, "entering all_reduce"), (1, "entering all_reduce")]


def test_a_raising_rank_is_named_with_the_users_line(pool: Pool) -> None:
    failure = misbehave(pool, "raise")

    assert (failure.kind, failure.ranks, failure.followers) == ("raised", [1], [0])
    assert "Rank 1 of 2 raised ValueError at " in failure.message
    assert "runner_jobs.py:" in failure.reason
    assert "planted: the loss is wrong" in failure.message
    assert failure.error is not None
    assert "Traceback" in failure.error.traceback


def test_a_killed_rank_is_named_with_its_signal(pool: Pool) -> None:
    failure = misbehave(pool, "kill")

    assert (failure.kind, failure.ranks, failure.followers) == ("died", [1], [0])
    assert "killed by signal 9 (SIGKILL)" in failure.message
    assert "during step 1" in failure.message
    assert "rank1.log" in failure.message


def test_a_rank_that_exits_is_named_with_its_code(pool: Pool) -> None:
    failure = misbehave(pool, "exit")

    assert (failure.kind, failure.ranks) == ("died", [1])
    assert "exit code 7" in failure.message


def test_a_hanging_rank_is_told_from_the_one_that_waits_for_it(pool: Pool) -> None:
    started = time.monotonic()
    failure = misbehave(pool, "hang", timeout_seconds=2.0)

    assert time.monotonic() - started < 6
    assert (failure.kind, failure.ranks, failure.followers) == ("hung", [1], [0])
    assert "runner_jobs.py:" in failure.message
    assert "in _hang" in failure.message
    assert "--timeout" in failure.message


def test_a_stopped_rank_is_told_from_the_one_that_waits_for_it(pool: Pool) -> None:
    failure = misbehave(pool, "stop", timeout_seconds=2.0)

    assert (failure.kind, failure.ranks) == ("hung", [1])
    assert "did not even answer" in failure.message


def test_different_sizes_in_one_collective_are_said(pool: Pool) -> None:
    failure = misbehave(pool, "shape")

    assert failure.kind == "died"
    assert "disagree about a collective's size" in failure.message


def test_a_refusal_of_all_ranks_leaves_the_workers(pool: Pool) -> None:
    pool.run("runner_jobs:echo", b"", timeout_seconds=TIMEOUT_SECONDS)
    before = pool.pids
    failure = misbehave(pool, "refuse")

    assert (failure.kind, failure.slug) == ("refused", "capture")
    assert failure.reason == "no rule for aten.foo at model.py:3"
    assert pool.pids == before


def test_a_refusal_of_one_rank_beats_its_followers(pool: Pool) -> None:
    failure = misbehave(pool, "refuse-alone")

    assert (failure.kind, failure.ranks) == ("refused", [1])


@pytest.mark.parametrize("what", ["raise", "kill"])
def test_the_pool_works_after_a_failure(pool: Pool, what: str) -> None:
    pool.start()
    starts = pool.starts
    misbehave(pool, what)
    answer = pool.run("runner_jobs:all_reduce", b"", timeout_seconds=TIMEOUT_SECONDS)

    assert answer == [b"3.0", b"3.0"]
    assert pool.starts == starts + 1


def test_a_worker_that_dies_between_jobs_is_replaced(pool: Pool) -> None:
    pool.run("runner_jobs:echo", b"", timeout_seconds=TIMEOUT_SECONDS)
    os.kill(pool.pids[0], signal.SIGKILL)
    # The fork server tells the controller a little after the process is gone.
    pool._ranks[0].process.join(TIMEOUT_SECONDS)
    answer = pool.run("runner_jobs:all_reduce", b"", timeout_seconds=TIMEOUT_SECONDS)

    assert answer == [b"3.0", b"3.0"]


@pytest.mark.parametrize("what", ["nothing", "raise", "kill", "thread"])
def test_ranks_start_with_what_was_captured_or_without_it(tmp_path: Path, what: str) -> None:
    folder = str(tmp_path)
    with Pool(2, work_dir=folder, log_dir=folder, backend="gloo", name="r") as ranks:
        ranks.capture = ("runner_jobs:capture", what.encode())
        for _ in range(2):  # also after a failure
            answer = ranks.run("runner_jobs:ahead", b"", timeout_seconds=TIMEOUT_SECONDS)
            told = [msgspec.json.decode(each) for each in answer]
            assert told[0] == told[1]
            ahead, by_parent = told[0]
            assert ahead == (by_parent if what == "nothing" else None)
            misbehave(ranks, "raise")

    assert ("planted: no capture" in (tmp_path / "r-start.log").read_text()) == (what == "raise")


def test_our_own_errors_are_raised_again_in_the_controller(pool: Pool) -> None:
    failure = misbehave(pool, "usage")

    with pytest.raises(errors.CaseError, match="planted") as caught:
        failure.reraise()
    assert caught.value.slug == "no-module"
    assert caught.value.detail == "the user's lines"


def test_two_pools_run_at_once(tmp_path: Path) -> None:
    with (
        Pool(2, work_dir=str(tmp_path), log_dir=str(tmp_path), backend="gloo", name="a") as one,
        Pool(2, work_dir=str(tmp_path), log_dir=str(tmp_path), backend="gloo", name="b") as two,
    ):
        for each in (one, two):
            each.submit("runner_jobs:all_reduce", b"", timeout_seconds=TIMEOUT_SECONDS)
        assert one.collect() == two.collect() == [b"3.0", b"3.0"]


def test_a_worker_without_a_group_runs_jobs(tmp_path: Path) -> None:
    with Pool(1, work_dir=str(tmp_path), log_dir=str(tmp_path), name="solo") as solo:
        assert solo.run("runner_jobs:echo", b"x", timeout_seconds=TIMEOUT_SECONDS) == [b"x0"]


def test_output_of_a_rank_is_in_its_log(tmp_path: Path) -> None:
    with Pool(1, work_dir=str(tmp_path), log_dir=str(tmp_path), name="solo") as solo:
        solo.run("runner_jobs:talk", b"", timeout_seconds=TIMEOUT_SECONDS)

    text = (tmp_path / "solo0.log").read_text()
    assert "from Python" in text
    assert "from C" in text


def test_the_controllers_side_imports_no_torch() -> None:
    check = "import sys, spmd_verify.runner.pool; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("what", ["hang", "idle"])
def test_nobody_survives_a_killed_controller(tmp_path: Path, what: str) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path), what],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 3
    if what == "hang":
        time.sleep(0.5)
    controller.kill()
    controller.communicate()

    wait_until_gone(pids)


CONTROLLER = textwrap.dedent(
    """
    import sys, time
    from multiprocessing import forkserver
    from spmd_verify.runner.pool import Pool

    pool = Pool(2, work_dir=sys.argv[1], log_dir=sys.argv[1], backend="gloo")
    pool.run("runner_jobs:all_reduce", b"", timeout_seconds=60)
    print(*pool.pids, forkserver._forkserver._forkserver_pid, flush=True)
    if sys.argv[2] == "hang":
        pool.run("runner_jobs:misbehave", b"hang", timeout_seconds=600)
    time.sleep(600)
    """
)


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    """Fail unless all processes are gone, or dead and only not yet reaped, in time."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Say whether a process exists and is not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def test_a_fork_server_that_cannot_import_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken_import.py").write_text("<<<<<<< HEAD\n")
    program = (
        "from spmd_verify.runner.pool import Pool, start_fork_server\n"
        "from spmd_verify.errors import InternalError\n"
        "start_fork_server(['broken_import'])\n"
        "try:\n"
        f"    Pool(1, work_dir={str(tmp_path)!r}, log_dir={str(tmp_path)!r}).start()\n"
        "except InternalError as error:\n"
        "    print(error.slug)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent.parent}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stdout == "fork-server\n", done.stderr
    assert "SyntaxError" in done.stderr
