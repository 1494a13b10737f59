"""Parameters that no plan names: whole on every rank, as DTensors beside those of the plan.

An optimizer or a total norm over DTensors and plain tensors together raises. So the rest are
DTensors too, copies on every rank; but a module's own code meets plain activations, and gets
the local tensor for as long as its forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from spmd_verify.dtensor_layouts import local_of
from spmd_verify.styles.tp_plans import distributed

# A module that has a parameter, and the parameter's name in it.
Place = tuple[nn.Module, str]


@contextmanager
def plain_is_whole() -> Iterator[None]:
    """Let plain tensors meet DTensors as what every rank of the mesh has alike.

    As torch's `implicit_replication`, whose gradients of the plain tensors would be DTensors.
    """
    with implicit_replication(), _Replicated():
        yield


class _Replicated(TorchFunctionMode):
    """Makes the plain operands beside a DTensor DTensors, so that autograd leads back to them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types  # DTensor overrides no torch function and is not among them
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        meshes = [leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)]

        def replicated(leaf: Any) -> Any:
            if isinstance(leaf, DTensor) or not isinstance(leaf, Tensor) or leaf.grad_fn is None:
                return leaf
            whole = [Replicate()] * meshes[0].ndim
            return DTensor.from_local(leaf, meshes[0], whole, run_check=False)

        if meshes:
            args, kwargs = pytree.tree_map(replicated, (args, kwargs))
        return func(*args, **kwargs)


def replicate_rest(model: nn.Module, mesh: Any, uses: Mapping[str, Iterable[str]]) -> None:
    """Make every plain parameter a DTensor that all ranks have, in place; ties stay tied.

    Args:
        model: The model, after its plan was applied.
        mesh: The axis that splits weights.
        uses: By parameter name, the modules whose forward reads it besides its own.
    """
    made: dict[int, nn.Parameter] = {}
    readers: dict[nn.Module, list[Place]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                continue
            if id(value) not in made:
                made[id(value)] = distributed(value, mesh, Replicate())
            module.register_parameter(name, made[id(value)])
            full = f"{path}.{name}" if path else name
            for reader in {path, *uses.get(full, ())}:
                readers.setdefault(modules[reader], []).append((module, name))
    for module, places in readers.items():
        _lend(module, places)


def reduce_partial(model: nn.Module) -> None:
    """Sum each gradient that is only a part on every rank as soon as it is there.

    torch leaves that to what reads the gradient, and refuses what changes it in place by anything
    but a factor: `p.grad.clamp_(...)` of a norm's weight whose tokens are on several ranks. A loop
    that is not linear would have to do this before; for one that is, nothing changes.
    """

    def reduce(parameter: Tensor) -> None:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
            whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
            parameter.grad = gradient.redistribute(placements=whole)

    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(reduce)


def _lend(module: nn.Module, places: list[Place]) -> None:
    """Give a module's forward the local tensors of parameters.

    Not where DTensors go in, which torch computes with the DTensor itself. Gradients of the
    local tensors are those of the whole: every rank computes the same with them.
    """
    lent: list[list[tuple[nn.Module, str, Any]]] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        is_plain = not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        now: list[tuple[nn.Module, str, Any]] = []
        for owner, name in places if is_plain else ():
            value = owner._parameters[name]
            if isinstance(value, DTensor) and value.placements == (Replicate(),):
                now.append((owner, name, value))
                owner._parameters[name] = local_of(value)
        lent.append(now)

    def after(*_: Any) -> None:
        for owner, name, value in lent.pop():
            owner._parameters[name] = value

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
