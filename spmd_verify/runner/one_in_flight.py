"""Process groups of gloo that run one collective after the other.

Private API of torch: `torch.distributed` makes every gloo group itself, with two threads, and
takes no options for it; the class it calls is the only place where the number can be given.
Needed because two all-gathers of one group in flight write into freed memory: measured with
torch 2.13.0 on 4 ranks, a script that only starts and awaits them died by SIGSEGV or SIGABRT
within a minute in four runs of four, and with one thread in none of two. Tensor parallel
styles of torch do that, and a style must not fail for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_torchs: Any = distributed_c10d.ProcessGroupGloo


class _OneInFlight(type):
    """Stands for torch's class: makes groups of one thread, all torch's own objects."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _torchs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_torchs, name)

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = _torchs._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [_torchs.create_default_device()]
        return _torchs(store, rank, size, options)


class ProcessGroupGloo(metaclass=_OneInFlight):
    """What `torch.distributed` calls for a gloo group in the processes of the runner."""


def use_one_thread() -> None:
    """From now on every gloo group that this process makes runs one collective at a time."""
    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[assignment,misc]
