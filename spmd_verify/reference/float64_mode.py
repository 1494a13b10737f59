"""Run a step in float64 with the random draws of the case's dtype.

Casting alone is not enough: `randn` of 16 or more elements, `rand` and `bernoulli(tensor)`
draw other numbers in float64. Every random operator is therefore executed in the case's
dtype from the same generator state, and its result cast. Factory calls that name no dtype are
the business of `factory_dtype`. Normative: verdicts.md part 2.2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Kernels that carry the tag of random operators but draw nothing themselves at dropout 0, or
# are decomposed before they are reached.
_NOT_DRAWING: Final = ("attention", "lstm", "gru", "rnn_", "_rnn")
_STANDARD_LIBRARY: Final = os.path.dirname(os.__file__)
_SKIPPED_FRAMES: Final = ("/torch/", "/spmd_verify/", "<frozen", "<string>")


class EagerMode(TorchDispatchMode):
    """Base of modes under which steps run eagerly, as they do under any dispatch mode.

    Private `_should_skip_dynamo`: else dynamo, which has nothing to compile here, is switched off
    and on around every operator.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave dynamo alone."""
        return False


class CaseDtypeDraws(EagerMode):
    """Draw in the case's dtype; note where something computes below float64.

    Attributes:
        islands: Places ("operator at file:line") whose result was floating and not float64,
            in order, once each. Random draws and 0-dim results do not count.
        draws: `(operator, place, generator state after)` of every draw, when traced.
    """

    def __init__(self, dtype: torch.dtype, *, trace: bool = False, cast: bool = True) -> None:
        """Set the case's dtype.

        Args:
            dtype: Floating dtype of the case.
            trace: Whether to keep `draws`; costs a copy of the generator state each.
            cast: False watches a run in the case's own dtype without changing it.
        """
        super().__init__()
        self.dtype = dtype
        self.islands: dict[str, None] = {}
        self.draws: list[tuple[str, str, Tensor]] = []
        self._trace = trace
        self._cast = cast

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator; random ones in the case's dtype."""
        named = dict(kwargs or {})
        if is_random(func):
            result = draw(func, args, named, self.dtype) if self._cast else func(*args, **named)
            if self._trace:
                self.draws.append((str(func), user_place(), torch.get_rng_state()))
            return result
        result = func(*args, **named)
        note_island(self.islands, func, result, torch.float64)
        return result


def draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Execute one random operator in `dtype` and give its result in float64.

    Operators that multiply a mask into their input (`native_dropout`, `rrelu_with_noise`)
    take only the mask from `dtype`; in-place operators fill a copy in `dtype` first.
    """
    name = func.overloadpacket.__name__
    if name == "native_dropout" and _is_float64(args[0]):
        source, p = args[0], args[1]
        _, mask = func(torch.ones_like(source, dtype=dtype), *args[1:], **kwargs)
        return source * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask
    if name.startswith("rrelu_with_noise") and _is_float64(args[0]):
        return _rrelu(func, args, kwargs, dtype)
    if name.endswith("_") and not name.startswith("_"):
        target = args[0]
        if not _is_float64(target):
            return func(*args, **kwargs)
        filled = target.to(dtype)
        func(filled, *_cast(args[1:], dtype), **kwargs)
        return target.copy_(filled)
    low = _cast(args, dtype)
    was_cast = any(new is not old for new, old in zip(low, args, strict=True))
    if kwargs.get("dtype") == torch.float64:
        kwargs, was_cast = {**kwargs, "dtype": dtype}, True
    result = func(*low, **kwargs)
    if (
        isinstance(result, Tensor)
        and result.is_floating_point()
        and (was_cast or kwargs.get("dtype") is None)
    ):
        return result.to(torch.float64)
    return result


def note_island(islands: dict[str, None], func: Any, result: Any, dtype: torch.dtype) -> None:
    """Add the place of an operator whose floating result is coarser than `dtype`.

    0-dim results are step counters and scalars, which lose nothing that matters.
    """
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if (
        isinstance(first, Tensor)
        and first.dtype is not dtype
        and first.dtype.is_floating_point
        and first.ndim
        and torch.finfo(first.dtype).eps > torch.finfo(dtype).eps
        and len(islands) < 64
    ):
        islands.setdefault(f"{func.overloadpacket.__name__} at {user_place()}")


def user_place() -> str:
    """Return `file:line` of the innermost frame of the user's code; `backward` if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        is_ours = any(part in path for part in _SKIPPED_FRAMES)
        is_library = "/site-packages/" in path and "/transformers/" not in path
        is_library |= "/site-packages/" not in path and path.startswith(_STANDARD_LIBRARY)
        if not is_ours and not is_library:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


def to_float64(value: Tensor) -> Tensor:
    """Return a floating tensor in float64, a complex one in complex128, others unchanged."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64) if value.is_floating_point() else value


def _cast(values: Iterable[Any], dtype: torch.dtype) -> list[Any]:
    """Cast float64 tensors to `dtype`, leave everything else."""
    return [value.to(dtype) if _is_float64(value) else value for value in values]


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


@lru_cache(maxsize=1024)
def is_random(func: Any) -> bool:
    """Say whether an operator draws random numbers itself; see `_NOT_DRAWING`."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return not any(part in func.overloadpacket.__name__ for part in _NOT_DRAWING)


def _rrelu(func: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Draw rrelu's slopes in `dtype`, apply them in float64."""
    source, noise = args[0], args[1]
    low_noise = noise.to(dtype)
    low = [source.to(dtype), low_noise, *args[2:]]
    outcome = func(*low, **kwargs)
    if isinstance(outcome, tuple):
        low_noise = outcome[1]
    noise.copy_(low_noise)
    value = torch.where(source <= 0, source * noise, source)
    if func.overloadpacket.__name__ == "rrelu_with_noise_":
        return source.copy_(value)
    return (value, noise) if isinstance(outcome, tuple) else value
