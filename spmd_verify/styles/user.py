"""The styles a case file brings: `parallelize_NAME` and the hooks of the same suffix."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.hooks import UserStyle
from spmd_verify.cases.training_step import Handling
from spmd_verify.errors import CaseError
from spmd_verify.parts import WHOLE
from spmd_verify.styles.eager import EagerStyle
from spmd_verify.styles.rank_batches import refuse_empty
from spmd_verify.styles.torch_base import unsynchronised
from spmd_verify.user_code import UserCode


@dataclass(frozen=True)
class UserRecipe:
    """One style of a case file.

    Attributes:
        name: The suffix of its hooks, `user` for plain `parallelize`.
        hooks: What the file has.
        is_per_rank: False: it promises what one device computes.
    """

    name: str
    hooks: UserStyle
    is_per_rank: bool = False

    def apply(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Call `setup_NAME` or `parallelize_NAME`.

        Raises:
            CaseError: `setup-result`, where a hook returns something else.
        """
        if self.hooks.setup is not None:
            made = self.hooks.setup(model, mesh)
            if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
                raise CaseError(
                    f"setup_{self.name}(model, mesh) returned no (model, optimizer): {case.path}. "
                    f"Got {type(made).__name__}. Return both",
                    slug="setup-result",
                )
            return made
        assert self.hooks.parallelize is not None, "discovery asks for one of the two"
        changed = self.hooks.parallelize(model, mesh)
        if changed is not None and not isinstance(changed, nn.Module):
            raise CaseError(
                f"parallelize_{self.name}(model, mesh) returned no module: {case.path}. Got "
                f"{type(changed).__name__}. Return the wrapped model, or nothing where it was "
                f"changed in place",
                slug="setup-result",
            )
        return (model if changed is None else changed), None

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Call `step_NAME`, else `step`, else the default step."""
        if self.hooks.step is not None:
            return self.hooks.step(model, optimizer, batch, mesh)
        return case.step(model, optimizer, batch, Handling(partial(unsynchronised, model), True))

    def evaluate(self, case: LoadedCase, model: nn.Module, batch: Any, mesh: Any) -> Any:
        """Call `evaluate_NAME`; else forward, unless the style has a step of its own."""
        if self.hooks.evaluate is not None:
            return self.hooks.evaluate(model, batch, mesh)
        if self.hooks.step is not None:
            return None
        args, kwargs, _ = case.split(batch)
        return model(*args, **kwargs)

    def layout(self, case: LoadedCase, name: str, axes: Mapping[str, int]) -> Any:
        """Return what `layout_NAME()` says of a parameter: the first glob that matches."""
        if self.hooks.layout is None:
            return None
        with UserCode(f"layout_{self.name}()", path=case.path, slug="hook-raised"):
            declared = self.hooks.layout()
        for pattern, value in declared.items():
            if fnmatchcase(name, pattern):
                return self._placements(case, pattern, value, axes)
        return None

    def _placements(
        self, case: LoadedCase, pattern: str, value: Any, axes: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """Return one placement per axis from a placement, a list or `{axis: placement}`."""
        if isinstance(value, Mapping):
            unknown = set(value) - set(axes)
            if not unknown:
                return tuple(value.get(axis, WHOLE) for axis in axes)
        else:
            listed = list(value) if isinstance(value, (list, tuple)) else [value]
            if len(listed) == len(axes):
                return tuple(listed)
        raise CaseError(
            f"layout_{self.name}() does not fit the mesh: {case.path}. Got {value!r} for "
            f"{pattern!r}, the mesh has the axes {', '.join(axes)}. Give one placement per "
            f"axis in mesh order, or {{axis: placement}}",
            slug="layout-hook",
        )

    @property
    def has_gather(self) -> bool:
        """Say whether the file has `gather_NAME`."""
        return self.hooks.gather is not None

    @property
    def has_policy(self) -> bool:
        """Say yes: whatever precision the file's style has is held to the reference's."""
        return True

    def gather(self, case: LoadedCase, name: str, parts: list[Tensor]) -> Tensor | None:
        """Call `gather_NAME(name, local_tensors)`."""
        assert self.hooks.gather is not None, "has_gather says so"
        with UserCode(f"gather_{self.name}()", path=case.path, slug="hook-raised"):
            return self.hooks.gather(name, parts)

    def checked_part(self, path: str, size: int, axis: str, ranks: int) -> None:
        """Refuse only what leaves a rank without samples: how parts are weighed is judged."""
        refuse_empty(self.name, path, size, axis, ranks)


def user_style(name: str, case: LoadedCase) -> EagerStyle:
    """Return a style of a case file by name."""
    return EagerStyle(UserRecipe(name, case.hooks.styles[name]))


def mesh_of(case: LoadedCase, name: str) -> dict[str, int] | None:
    """Return what `mesh_NAME()` says, None without it.

    Raises:
        CaseError: `mesh-hook`, where it is no mapping of axis names to ranks.
    """
    hook = case.hooks.styles[name].mesh
    if hook is None:
        return None
    with UserCode(f"mesh_{name}()", path=case.path, slug="hook-raised"):
        declared = hook() if not inspect.signature(hook).parameters else None
    sizes = dict(declared) if isinstance(declared, Mapping) else {}
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes.values()):
        raise CaseError(
            f"mesh_{name}() gives no mesh: {case.path}. Got {declared!r}. Expected a dict such "
            f'as {{"dp": 2, "tp": 2}}',
            slug="mesh-hook",
        )
    return {str(axis): int(size) for axis, size in sizes.items()}
