"""The random generator's state as a value of the graph.

A checkpoint notes the generator's state in forward and puts it back to draw the same
mask again in backward; a step may seed the generator. Traced as they stand, such calls
would act once, at capture, and the replayed graph would draw other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

own = torch.ops.spmd

# The tag keeps the calls in their order among the draws.
_DRAWS = (torch.Tag.nondeterministic_seeded,)
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("get_rng_state(str device) -> Tensor", tags=_DRAWS)
_library.define("set_rng_state(Tensor state, str device) -> ()", tags=_DRAWS)
_library.define("manual_seed(int seed) -> ()", tags=_DRAWS)


def _get(device: str) -> Tensor:
    if device == "cpu":
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set(state: Tensor, device: str) -> None:
    if device == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


for _name, _kernel, _fake in (
    ("get_rng_state", _get, lambda device: torch.empty(_size(device), dtype=torch.uint8)),
    ("set_rng_state", _set, lambda state, device: None),
    ("manual_seed", _seed, lambda seed: None),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spmd::{_name}", _fake, lib=_library)


def _size(device: str) -> int:
    generator = torch.default_generator if device == "cpu" else torch.Generator(device)
    return generator.get_state().numel()


@contextmanager
def generator_in_graph() -> Iterator[None]:
    """Trace reads, writes and seeds of the default generators while the body runs.

    These are plain Python functions of torch that no mode sees, hence the exchange of the
    module's attributes; who needs the real state meanwhile asks `torch.default_generator`.
    """
    exchanged = _exchanged()
    before = [(module, name, getattr(module, name)) for module, name, _ in exchanged]
    for module, name, function in exchanged:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _exchanged() -> list[tuple[Any, str, Callable[..., Any]]]:
    def seed(number: int) -> torch.Generator:
        own.manual_seed(int(number))
        return torch.default_generator

    listed: list[tuple[Any, str, Callable[..., Any]]] = []
    for module in (torch, torch.random):
        listed += [
            (module, "get_rng_state", lambda: own.get_rng_state("cpu")),
            (module, "set_rng_state", lambda state: own.set_rng_state(state, "cpu")),
            (module, "manual_seed", seed),
        ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)

        def place(device: Any) -> str:
            if isinstance(device, int) or device is None:
                index = torch.accelerator.current_device_index() if device is None else device
                return f"{accelerator.type}:{index}"
            return str(device)

        listed += [
            (module, "get_rng_state", lambda device=None: own.get_rng_state(place(device))),
            (
                module,
                "set_rng_state",
                lambda state, device=None: own.set_rng_state(state, place(device)),
            ),
        ]
    return listed
