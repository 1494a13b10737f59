"""`spmd-verify doctor`: what is there, what will not work and why, and what to do about it.

Torch-free: torch is imported when it is asked about, and a machine without it is told so.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from spmd_verify.errors import SpmdVerifyError
from spmd_verify.exit_codes import PASSED, WRONG_USE
from spmd_verify.version import __version__

TORCH_SERIES: Final = "2.13"
# What it is for, if it is not needed by everything.
_PACKAGES: Final[dict[str, str]] = {
    "numpy": "",
    "safetensors": "",
    "msgspec": "",
    "tabulate": "",
    "rich": "the animation on a terminal",
    "transformers": "addresses hf:TYPE; pip install 'spmd-verify[hf]'",
    "hypothesis": "the verb fuzz; pip install 'spmd-verify[fuzz]'",
    "pytest": "pytest --spmd; pip install pytest",
}
_GIB: Final = 2**30
# Two ranks, the reference worker and the fork server: 4 x 125 MB of their own after training
# small models (measured, torch 2.13), and as much again for a model that is not small.
_LEAST_MEMORY: Final = _GIB
# A reference of three steps holds a model about 30 times.
_LEAST_SPACE: Final = _GIB
# What docker gives without --shm-size.
_DOCKER_SHARED: Final = 64 * 2**20
_TIMEOUT_SECONDS: Final = 120.0
_CUDA: Final = "cuda"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        value: What was found.
        problem: What will not work and why; empty where all is well.
        remedy: What to do about it.
        is_fatal: Nothing can be run.
    """

    name: str
    value: str
    problem: str = ""
    remedy: str = ""
    is_fatal: bool = False


def examine() -> tuple[str, int]:
    """Look at everything; return the report and the exit code."""
    findings = list(_findings())
    return render(findings), WRONG_USE if any(each.is_fatal for each in findings) else PASSED


def render(findings: list[Finding]) -> str:
    """Return the report as text without a final newline."""
    width = max(len(each.name) for each in findings)
    lines = [f"{each.name:<{width}}  {each.value}" for each in findings]
    problems = [each for each in findings if each.problem]
    if problems:
        lines.append("")
    for each in problems:
        lines.append(f"{'problem' if each.is_fatal else 'limit'}: {each.problem}")
        lines.append(f"  remedy: {each.remedy}")
    if any(each.is_fatal for each in problems):
        last = "nothing can be run before the problems above are solved"
    else:
        last = "checks can be run" + (", within the limits above" if problems else "")
    return "\n".join([*lines, "", last])


def _findings() -> Iterator[Finding]:
    """Look at one thing after the other, the quick ones first."""
    yield Finding("spmd-verify", __version__)
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", platform.platform())
    yield from _packages()
    yield cores()
    yield memory()
    yield shared_memory()
    yield temporary_folder(tempfile.gettempdir())
    torch, found = _torch()
    yield found
    if torch is None:
        yield Finding("ranks", "not tried without torch")
        return
    yield from _backends(torch)
    yield from _ranks(can_gloo=torch.distributed.is_gloo_available())


def _packages() -> Iterator[Finding]:
    """Give the versions of what is used, and what misses where something is not there."""
    for name, purpose in _PACKAGES.items():
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            if purpose:
                yield Finding(name, f"not installed; it is for {purpose}")
                continue
            yield Finding(
                name,
                "not installed",
                f"{name} is not installed, and every check needs it",
                f"pip install {name}",
                is_fatal=True,
            )


def _torch() -> tuple[Any, Finding]:
    """Import torch; None where that is not possible."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        return None, Finding(
            "torch",
            "cannot be imported",
            f"torch cannot be imported ({type(error).__name__}: {error}). Reports, compare of "
            f"records, styles and schema work without it, checks do not",
            f"pip install 'torch=={TORCH_SERIES}.*', on a machine without GPU from "
            f"https://download.pytorch.org/whl/cpu",
            is_fatal=True,
        )
    found = str(torch.__version__)
    if found.startswith(f"{TORCH_SERIES}."):
        return torch, Finding("torch", f"{found}, {torch.get_num_threads()} threads by default")
    return torch, Finding(
        "torch",
        found,
        f"torch is {found}; the engine and the observers are built on {TORCH_SERIES}, with another "
        f"version they may refuse or fail",
        f"pip install 'torch=={TORCH_SERIES}.*'",
    )


def cores(root: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Say how many cores this process may use, a container's share included."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = _read(root / "cpu.max").partition(" ")
    share = f", the container may use {int(quota) / int(period):g}" if quota.isdecimal() else ""
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return Finding(
        "cores", f"{usable} of {os.cpu_count()}{share}; OMP_NUM_THREADS {threads}, 1 in every rank"
    )


def memory(root: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Say how much memory there is, and how much a container leaves of it."""
    pairs = (line.partition(":") for line in _read(meminfo).splitlines())
    kibibytes = {key: int(value.split()[0]) for key, _, value in pairs if value.split()}
    if "MemAvailable" not in kibibytes:
        return Finding("memory", "unknown on this system")
    total, free = (kibibytes[key] * 1024 for key in ("MemTotal", "MemAvailable"))
    value = f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} available"
    limits = [_read(root / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    allowed = min((int(text) for text in limits if text.isdecimal()), default=total)
    if allowed < total:
        used = [_read(root / name) for name in ("memory.current", "memory/memory.usage_in_bytes")]
        free = min(free, allowed - max((int(text) for text in used if text.isdecimal()), default=0))
        value += f"; the container may use {allowed / _GIB:.1f} GiB, {free / _GIB:.1f} are left"
    if free >= _LEAST_MEMORY:
        return Finding("memory", value)
    return Finding(
        "memory",
        value,
        f"{free / _GIB:.2f} GiB of memory are left; two ranks with a small model and their "
        f"reference need about {_LEAST_MEMORY / _GIB:g}, and a rank without memory is killed",
        "use fewer ranks or a smaller model, or give the container more (docker run --memory)",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Say how large the memory is that processes share; ranks do not need it, loaders do."""
    if not folder.is_dir():
        return Finding("shared memory", f"no {folder} on this system; ranks do not need it")
    size = shutil.disk_usage(folder).total
    value = f"{size / 2**20:.0f} MiB in {folder}"
    if size > _DOCKER_SHARED:
        return Finding("shared memory", value)
    return Finding(
        "shared memory",
        value,
        f"{folder} has {size / 2**20:.0f} MiB: a case that loads data with DataLoader(num_workers="
        f"...) may die with a bus error. Ranks themselves do not use it",
        "docker run --shm-size=1g, or num_workers=0 in the case",
    )


def temporary_folder(path: str) -> Finding:
    """Say whether the temporary folder takes references and sockets."""
    from spmd_verify.runner.pool import LONGEST_TEMPORARY_FOLDER, SHORT_FOLDERS

    name, value = "temporary folder", f"{path} ({len(path)} characters)"
    if not os.access(path, os.W_OK):
        return Finding(
            name,
            value,
            f"the temporary folder cannot be written: {path}; references and logs go there",
            "set TMPDIR to a folder that can be written",
            is_fatal=True,
        )
    free = shutil.disk_usage(path).free
    value += f", {free / _GIB:.1f} GiB free"
    is_long = len(path) > LONGEST_TEMPORARY_FOLDER
    if is_long and not any(os.access(short, os.W_OK) for short in SHORT_FOLDERS):
        return Finding(
            name,
            value,
            f"the path of the temporary folder is too long for a socket ({LONGEST_TEMPORARY_FOLDER}"
            f" characters at most), and {', '.join(SHORT_FOLDERS)} cannot be written",
            "set TMPDIR to a shorter path",
            is_fatal=True,
        )
    if free < _LEAST_SPACE:
        return Finding(
            name,
            value,
            f"{free / _GIB:.2f} GiB are free in {path}; a reference of three steps holds the model "
            f"about 30 times",
            "free some space, or set TMPDIR to another folder",
        )
    return Finding(name, value + ("; sockets go to a shorter path" if is_long else ""))


def _backends(torch: Any) -> Iterator[Finding]:
    """Say over what ranks can talk, and which accelerators are there."""
    dist = torch.distributed
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    value = ", ".join(f"{name} {'yes' if found else 'no'}" for name, found in there.items())
    if there["gloo"]:
        yield Finding("backends", value)
    else:
        yield Finding(
            "backends",
            value,
            "this build of torch has no gloo: ranks on CPU cannot talk. Engine styles still run "
            "under --runner lockstep",
            "install a build of torch with gloo; the wheels of pytorch.org have it",
        )
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    yield Finding(_CUDA, f"{count} devices: {', '.join(names)}" if count else "no device")


def _ranks(*, can_gloo: bool) -> Iterator[Finding]:
    """Start a worker, then two ranks that sum a number."""
    from spmd_verify.runner.folders import LogFolder, work_folder

    with work_folder() as work_dir, LogFolder(None) as logs:
        alone = _summed(work_dir, logs.path, 1, None)
        yield _tried("fork server", "starts workers", alone, 1.0)
        if can_gloo and alone[0] == 1.0:
            together = _summed(work_dir, logs.path, 2, "gloo")
            yield _tried("all-reduce", "2 ranks over gloo have the right sum", together, 3.0)


def _summed(
    work_dir: str, log_dir: str, ranks: int, backend: str | None
) -> tuple[float | None, str, float]:
    """Let ranks sum; return what they have, why they have not, and the seconds it took."""
    from spmd_verify.runner.failures import Failure
    from spmd_verify.runner.pool import Pool
    from spmd_verify.runner.specs import CHECKUP_JOB, decode

    folders = {"work_dir": work_dir, "log_dir": log_dir}
    start = time.monotonic()
    try:
        with Pool(ranks, name=f"doctor{ranks}", backend=backend, **folders) as pool:
            answer = pool.run(CHECKUP_JOB, b"", timeout_seconds=_TIMEOUT_SECONDS)
    except SpmdVerifyError as error:
        return None, error.message, time.monotonic() - start
    seconds = time.monotonic() - start
    if isinstance(answer, Failure):
        return None, answer.message, seconds
    found = {decode(part, float) for part in answer}
    return (found.pop() if len(found) == 1 else None), f"the ranks have {found}", seconds


def _tried(
    name: str, success: str, outcome: tuple[float | None, str, float], expected: float
) -> Finding:
    """Return what became of an experiment."""
    found, why, seconds = outcome
    if found == expected:
        return Finding(name, f"{success} ({seconds:.1f} s)")
    reason = why if found is None else f"got {found}, expected {expected}"
    return Finding(
        name,
        "does not work",
        f"{name} does not work: {reason}",
        "run again with a shorter TMPDIR and without proxies or sandboxes around local sockets; "
        "GLOO_SOCKET_IFNAME names the interface (lo by default)",
        is_fatal=True,
    )


def _read(path: Path) -> str:
    """Return a small file of the system without its line break; empty where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
