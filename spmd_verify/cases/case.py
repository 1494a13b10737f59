"""A loaded case: everything the reference and every rank need to run the same training.

Made by `load_case` from `(address, dtype, seed, steps, overrides)` alone, in any process;
nothing of the user's is ever sent between processes. All tensors are global. Seeds: `seed`
before the model is built, `seed + 1` before inputs and targets, `seed + 2 + n` before
step n (`seed_step`).
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd_verify import refusals
from spmd_verify.cases.address import Address, parse
from spmd_verify.cases.batches import (
    BatchForm,
    BatchSource,
    batch_dim,
    cast_floating,
    declared_dims,
    first_size,
    leaf_paths,
)
from spmd_verify.cases.default_loss import PROJECTION_NOTE, default_loss, own_loss
from spmd_verify.cases.discovery import discover
from spmd_verify.cases.factory_dtype import FactoryDtype
from spmd_verify.cases.hooks import Case, UserStyle
from spmd_verify.cases.model_build import (
    cast_module,
    check_model,
    construct,
    dtypes_changed_by_forward,
    forward_parameters,
    is_lazy,
    materialise,
    misfit,
    named_tensors,
    positional_names,
    required_names,
)
from spmd_verify.cases.modules import import_case_module, source_hash
from spmd_verify.cases.training_step import ONE_DEVICE, Handling, default_step, own_step
from spmd_verify.errors import ReferenceRunError
from spmd_verify.no_random import NoRandom
from spmd_verify.seeding import seed_all
from spmd_verify.style_ids import DATA_AXES
from spmd_verify.user_code import UserCode
from spmd_verify.variants import KEYS, Variants

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}
# Large enough to move every parameter visibly, small enough for a few steps of anything.
PROBE_LEARNING_RATE: Final = 1e-2
TOLERANCES_NOTE: Final = "tolerances() is not used: every tensor's own noise is measured"
# Overrides that change how a case is run, not what it is.
SETTINGS: Final = KEYS | {"between", "exact", "inputs", "optimizer", "random", "rows", "schedule"}
_REFUSED_OPTIMIZERS: Final = ("LBFGS", "SparseAdam")


@dataclass(frozen=True)
class CaseSettings:
    """How a case is run, whatever the style."""

    dtype: torch.dtype
    seed: int
    steps: int
    overrides: Mapping[str, str]


class LoadedCase:
    """One case, ready to run.

    Attributes:
        address: What it was loaded from.
        hooks: The case as its file describes it.
        dtype: Of parameters, buffers and floating inputs.
        seed: The base seed.
        steps: Training steps per run.
        overrides: As given to `load_case`.
        variants: Those among them that change how the case is trained.
        settings: The four above, as one value.
        source_hash: SHA-256 of the case file.
        path: The user's file, or the address where there is none.
    """

    def __init__(
        self,
        address: Address,
        hooks: Case,
        settings: CaseSettings,
        source_hash: str,
    ) -> None:
        """Keep the description; nothing of the user's is run yet."""
        self.address = address.text
        self.hooks = hooks
        self.settings = settings
        self.dtype = settings.dtype
        self.seed = settings.seed
        self.steps = settings.steps
        self.overrides = dict(settings.overrides)
        self.variants = Variants.of(settings.overrides)
        self.source_hash = source_hash
        self.path = address.source if address.kind != "hf" else address.text
        self._batches = BatchSource(hooks, path=self.path, seed=self.seed, dtype=self.dtype)

    def with_variants(self, **variants: Any) -> Self:
        """Return the case with other variants, by field of `Variants`."""
        other = copy.copy(self)
        other.variants = replace(self.variants, **variants)
        return other

    # -- model -----------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Build a fresh model from `seed`, cast to the case's dtype, in training mode.

        Raises:
            CaseError: `constructor-raised`, `missing-constructor-arguments`,
                `not-a-module`, `sparse-gradient`, `nothing-trainable`.
        """
        settled = self._settled_dtypes if self.dtype != torch.get_default_dtype() else {}
        model = self._cast_model()
        for name, tensor in named_tensors(model):
            if name in settled:
                tensor.data = tensor.data.to(settled[name])
        check_model(model, self.address)
        return model

    def _cast_model(self) -> nn.Module:
        seed_all(self.seed)
        model = construct(self.hooks, where=self.address, path=self.path)
        if any(is_lazy(tensor) for tensor in model.parameters()):
            batch = cast_floating(self.batch(0), torch.get_default_dtype())
            args, kwargs, _ = self.split(batch)
            materialise(model, args, kwargs, path=self.path)
        cast_module(model, self.dtype)
        return model

    @functools.cached_property
    def _settled_dtypes(self) -> dict[str, torch.dtype]:
        """Return what a first forward casts back: a router that wants float32, say.

        Done before the first step it is no part of any step, whatever the style.
        """
        model = self._cast_model()
        args, kwargs, _ = self.split(self.batch(0))
        with self.factory_mode():
            return dtypes_changed_by_forward(model, args, kwargs, path=self.path)

    @functools.cached_property
    def forward_parameters(self) -> dict[str, inspect.Parameter]:
        """Return the parameters of the model's forward; builds the model if it must."""
        build = self.hooks.model
        if isinstance(build, type) and issubclass(build, nn.Module):
            return forward_parameters(build)
        return forward_parameters(self.build_model())

    # -- batches ---------------------------------------------------------------------------

    def inputs(self, step: int) -> Any:
        """Return a copy of the global inputs of a step, as `get_inputs` shapes them."""
        return self._batches.parts(step)[0]

    def targets(self, step: int) -> Any:
        """Return a copy of the global targets of a step; None without `get_targets`."""
        return self.split(self.batch(step))[2]

    def batch(self, step: int) -> Any:
        """Return a copy of the global batch of a step, as `step` gets it.

        The override `rows=divisible:N` leaves out samples until N divides their number.
        """
        batch = self._batches.batch(step)
        divisor = int(self.overrides.get("rows", "divisible:1").rpartition(":")[2])
        if divisor == 1:
            return batch
        leaves, spec = pytree.tree_flatten(batch)
        for i, dim in enumerate(self.batch_dims):
            if dim is not None:
                kept = max(leaves[i].shape[dim] // divisor, 1) * divisor
                leaves[i] = leaves[i].narrow(dim, 0, min(kept, leaves[i].shape[dim]))
        return pytree.tree_unflatten(leaves, spec)

    @functools.cached_property
    def form(self) -> BatchForm:
        """Return how batches are put together."""
        return self._batches.form

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return `(args, kwargs, targets)` of a batch or of a rank's part of one."""
        return self.form.split(batch)

    @functools.cached_property
    def leaf_paths(self) -> list[str]:
        """Return the argument path of every leaf of a batch, in pytree order."""
        positional = self.form.inputs != "dict"
        names = positional_names(self.forward_parameters) if positional else ()
        return leaf_paths(self._batches.batch(0), self.form, names)

    @functools.cached_property
    def input_batch_dims(self) -> dict[str, int | None]:
        """Return the batch dim of every tensor of a batch by argument path.

        Declared by `input_sharding()`; else dim 0 where its size is the batch size, else None.
        """
        declared = self._declared(self.hooks.input_sharding)
        batch = self._batches.batch(0)
        leaves = dict(zip(self.leaf_paths, pytree.tree_leaves(batch), strict=True))
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        dims: dict[str, int | None] = {
            path: batch_dim(declared[path]) for path in tensors if path in declared
        }
        size = first_size(tensors, dims)
        return {
            path: dims.get(path, 0 if leaf.ndim and leaf.shape[0] == size else None)
            for path, leaf in tensors.items()
        }

    @property
    def batch_dims(self) -> list[int | None]:
        """Return `input_batch_dims` as one entry per leaf of a batch, in pytree order."""
        return [self.input_batch_dims.get(path) for path in self.leaf_paths]

    @property
    def batch_size(self) -> int:
        """Return the number of samples of the global batch of step 0; 1 where none is."""
        return self.batch_size_of(self.batch(0))

    def batch_size_of(self, batch: Any) -> int:
        """Return the number of samples of a batch or of a rank's part of one."""
        for leaf, dim in zip(pytree.tree_leaves(batch), self.batch_dims, strict=True):
            if dim is not None:
                return int(leaf.shape[dim])
        return 1

    def sharding(
        self, axes: tuple[str, ...], style: str | None = None
    ) -> dict[str, dict[str, int | None]]:
        """Return `{argument path: {axis: dim or None}}` for one style on given axes.

        Data axes (`dp`, `fsdp`, `replicate`, `shard`) shard the batch dim, others leave the
        argument whole, unless `input_sharding_NAME()` or `input_sharding()` says otherwise.
        """
        own = self.hooks.styles.get(style or "", UserStyle()).input_sharding
        declared = self._declared(own or self.hooks.input_sharding)
        result: dict[str, dict[str, int | None]] = {}
        for path, dim in self.input_batch_dims.items():
            said = declared.get(path, dim)
            per_axis = said if isinstance(said, Mapping) else dict.fromkeys(DATA_AXES, said)
            result[path] = {
                axis: per_axis.get(axis, dim if axis in DATA_AXES else None) for axis in axes
            }
        return result

    def _declared(self, hook: Any) -> dict[str, Any]:
        """Return what an `input_sharding` hook says, by leaf path."""
        if hook is None:
            return {}
        with UserCode("input_sharding()", path=self.path, slug="hook-raised"):
            declared = hook() if callable(hook) else hook
        return declared_dims(declared, self.leaf_paths, self.address)

    # -- training --------------------------------------------------------------------------

    def seed_step(self, step: int) -> None:
        """Seed every generator for one training step."""
        seed_all(self.seed + 2 + step)

    def optimizer(self, model: nn.Module) -> Any:
        """Build the optimizer: `get_optimizer`, else AdamW(1e-3).

        The override `optimizer=sgd` gives the plain SGD probe instead.

        Returns:
            A `torch.optim.Optimizer`, or a list of them where the hook returned several.

        Raises:
            CaseError: `not-an-optimizer`, `optimizer-refused`, `hook-raised`.
        """
        parameters = list(model.parameters())
        if self.overrides.get("optimizer") == "sgd":
            return torch.optim.SGD(parameters, lr=PROBE_LEARNING_RATE)
        hook = self.hooks.optimizer
        if hook is None:
            return torch.optim.AdamW(parameters, lr=1e-3)
        takes_model = next(iter(inspect.signature(hook).parameters), "") == "model"
        with UserCode("get_optimizer()", path=self.path, slug="hook-raised"):
            made = hook(model if takes_model else parameters)
        several = isinstance(made, (list, tuple))
        for optimizer in made if several else [made]:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise refusals.bad_optimizer(self.address, type(optimizer).__name__)
            if type(optimizer).__name__ in _REFUSED_OPTIMIZERS:
                raise refusals.refused_optimizer(self.address, type(optimizer).__name__)
        return list(made) if several else made

    def step(
        self, model: nn.Module, optimizer: Any, batch: Any, handling: Handling = ONE_DEVICE
    ) -> Any:
        """Run one training step, from zero_grad to optimizer.step, and return the loss.

        The user's `step` where there is one, else `training_step.default_step`.

        Raises:
            ReferenceRunError: `loss-not-scalar`, `loss-without-gradient`, `no-default-loss`.
            CaseError: `too-few-samples`.
        """
        with self.factory_mode():
            if self.hooks.step is None:
                return default_step(self, model, optimizer, batch, handling)
            with own_step(self, model):
                return self.hooks.step(model, optimizer, batch)

    def on_one_device(self) -> UserCode:
        """Return the context of single-device runs: what the model raises is the user's.

        Not for runs under a style, where an exception may be the engine's.
        """
        return UserCode(
            "The training step on one device, before any parallel style,",
            path=self.path,
            slug="forward-raised",
            remedy=self._misfit,
            kind=ReferenceRunError,
        )

    def _misfit(self) -> str:
        """Say how the inputs do not fit forward; "" where they do or the file has a step."""
        if self.hooks.step is not None:
            return ""
        args, kwargs, _ = self.split(self.batch(0))
        return misfit(self.forward_parameters, args, kwargs)

    def factory_mode(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context every step of this case runs in: see `factory_dtype`, `no_random`."""
        modes = contextlib.ExitStack()
        if self.dtype != torch.get_default_dtype():
            modes.enter_context(FactoryDtype(self.dtype))
        if self.overrides.get("random") == "off":
            modes.enter_context(NoRandom())
        return modes

    def loss(self, output: Any, targets: Any = None, *, batch_size: int | None = None) -> Any:
        """Return the loss of an output.

        Args:
            output: What forward returned.
            targets: What `get_targets` gave for the same samples.
            batch_size: Samples in the batch; the global batch's size when left out. Used by
                the default projection only.
        """
        hook = self.hooks.loss
        if hook is None:
            return default_loss(output, batch_size or self.batch_size, self.address)
        if self.form.targets != "none":
            return hook(output, targets)
        if len(required_names(hook)) > 1:
            raise refusals.loss_needs_targets(self.address)
        return hook(output)

    # -- description -----------------------------------------------------------------------

    @property
    def user_styles(self) -> tuple[str, ...]:
        """Return the names of the file's own styles."""
        return tuple(self.hooks.styles)

    @property
    def discovered(self) -> dict[str, str]:
        """Return what was found for every hook, and what stands in where nothing was."""
        defaults = {
            "targets": "none",
            "loss": "the output's own loss, else a fixed random projection",
            "optimizer": "AdamW(lr=1e-3)",
            "step": "zero_grad, forward, loss, backward, step",
            "input_sharding": "dim 0 where it is the batch size",
        }
        names = ["model", "init_inputs", "inputs", "targets", "loss", "optimizer", "step"]
        found = {
            name: self.hooks.origin.get(name, f"default: {defaults.get(name, 'none')}")
            for name in [*names, "input_sharding"]
        }
        found["styles"] = ", ".join(self.user_styles) or "none of its own"
        return found

    def notes(self, output: Any) -> list[str]:
        """Return the remarks a report prints about the case, given one forward's output."""
        made_up = self.hooks.loss is None and self.hooks.step is None and own_loss(output) is None
        unused = [TOLERANCES_NOTE] if self.hooks.tolerances is not None else []
        return [PROJECTION_NOTE, *unused] if made_up else unused


def load_case(
    address: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    steps: int = 3,
    overrides: Mapping[str, str] | None = None,
) -> LoadedCase:
    """Load a case in this process; the same arguments give the same case anywhere.

    Args:
        address: See `address.parse`.
        dtype: A key of `DTYPES`.
        seed: The base seed; also set before the file is executed.
        steps: Training steps per run.
        overrides: Variants (docs/variants.md), `optimizer=sgd`, `exact=yes` (docs/design.md
            part 3.8), `inputs=adversarial` (docs/adversarial.md), and for `hf:` addresses fields
            of the configuration.

    Raises:
        CaseError: with the smallest fix.
    """
    given = dict(overrides or {})
    parsed = parse(address)
    seed_all(seed)
    if parsed.kind == "hf":
        from spmd_verify.hf.cases import hf_case  # transformers only where asked for

        fields = {key: value for key, value in given.items() if key not in SETTINGS}
        hooks, digest = hf_case(parsed.source, fields)
    else:
        module = import_case_module(parsed)
        hooks, digest = discover(module, parsed), source_hash(parsed, module)
    settings = CaseSettings(DTYPES[dtype], seed, steps, given)
    from spmd_verify.case_kinds import kind_of  # builds on this module

    case = kind_of(given)(parsed, hooks, settings, digest)
    if hooks.step is not None and case.variants.needs_default_step:
        raise refusals.step_has_own_update(address, case.variants.needs_default_step)
    if hooks.inputs is None:
        taken = [str(entry) for entry in case.forward_parameters.values()]
        raise refusals.no_inputs(address, taken)
    return case
