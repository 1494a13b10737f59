"""Watch the collectives of an eager step, and change one of them.

A dispatch mode sees what Python calls (`c10d.*`, `_c10d_functional.*`) and what C++ does, such
as the reducer of DistributedDataParallel (tests/test_certify.py has all of them). A fault
changes what this rank sends, or the group it is sent in; no rank is kept waiting.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.planting.faults import PAYLOAD_KINDS, Collective, Fault
from spmd_verify.planting.groups import MeshGroups
from spmd_verify.planting.payload import scaled, shifted
from spmd_verify.user_code import is_user_file

# The collective behind each operator of both namespaces (torch 2.13: the schemas of `c10d` and
# `_c10d_functional`). Operators that only receive or wait carry no payload of this rank.
_OPERATORS: Final[dict[str, str]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), "all_reduce"),
    **dict.fromkeys(("all_reduce", "all_reduce_"), "all_reduce"),
    **dict.fromkeys(("all_reduce_coalesced", "all_reduce_coalesced_"), "all_reduce"),
    **dict.fromkeys(("allgather_", "allgather_coalesced_", "_allgather_base_"), "all_gather"),
    "allgather_into_tensor_coalesced_": "all_gather",
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_out"), "all_gather"),
    "all_gather_into_tensor_coalesced": "all_gather",
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_"), "reduce_scatter"),
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_out"), "reduce_scatter"),
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    **dict.fromkeys(("alltoall_", "alltoall_base_", "all_to_all_single"), "all_to_all"),
    **dict.fromkeys(("broadcast_", "broadcast"), "broadcast"),
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    **dict.fromkeys(("send", "isend"), "send"),
}
_INPUTS: Final = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
_OUTPUTS: Final = ("output_tensors", "output_tensor", "output_lists", "outputs", "output", "out")

Bound = dict[str, Any]


class Watch(TorchDispatchMode):
    """Context around the steps of one cell on one rank.

    Attributes:
        collectives: Of the first step.
        has_changed: Whether the fault changed what this rank sends.
    """

    def __init__(self, fault: Fault, axes: Mapping[str, int]) -> None:
        """Make the groups the fault needs; called on all ranks alike."""
        super().__init__()
        self.collectives: list[Collective] = []
        self.has_changed = False
        self._fault = fault
        self._groups = MeshGroups(axes)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._is_first = True
        self._sent: list[Any] = []  # what is on its way must not be freed
        self._instead: Any = None
        if fault.kind == "drop":
            self._instead = self._groups.alone()
        elif fault.kind == "wrong_group":
            self._instead = self._groups.other(fault.group)

    def end_step(self) -> None:
        """Begin to count again."""
        self._counts.clear()
        self._sent.clear()
        self._is_first = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let everything pass but the collective of the fault."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch first; what that calls is seen here
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if func.namespace not in ("c10d", "_c10d_functional") or name not in _OPERATORS:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        bound: Bound = {**dict(zip(names, args, strict=False)), **kwargs}
        collective = self._counted(_OPERATORS[name], bound)
        if collective.key != self._fault.key or self._fault.kind not in PAYLOAD_KINDS:
            return func(**bound)
        with torch.no_grad():
            return self._planted(func, collective, bound)

    def _counted(self, operator: str, bound: Bound) -> Collective:
        """Describe a collective and count it."""
        ranks = tuple(dist.get_process_group_ranks(_group(bound)))
        axis = self._groups.axis_of(ranks)
        payload = [t for t in pytree.tree_leaves(_input(bound)[1]) if isinstance(t, Tensor)]
        collective = Collective(
            operator=operator,
            axis=axis,
            nth=self._counts[operator, axis],
            size=len(ranks),
            payload_bytes=sum(t.nbytes for t in payload),
            rows=max((t.shape[0] if t.ndim else 1 for t in payload), default=0),
            is_floating=any(t.is_floating_point() or t.is_complex() for t in payload),
            reduction=_reduction(bound),
            line=_user_line() if self._is_first else "",
            ranks=[dist.get_rank()],
        )
        self._counts[operator, axis] += 1
        if self._is_first:
            self.collectives.append(collective)
        return collective

    def _planted(self, func: Any, collective: Collective, bound: Bound) -> Any:
        """Run one collective with the fault."""
        kind = self._fault.kind
        if kind == "drop":
            return self._dropped(func, collective, bound)
        if kind == "wrong_group":
            self.has_changed = True
            return func(**_in_group(bound, self._instead))
        name, payload = _input(bound)
        if kind == "zero_rank" and dist.get_rank() != self._fault.rank:
            return func(**bound)
        changed = pytree.tree_map_only(Tensor, self._changed, payload)
        pairs = zip(pytree.tree_leaves(payload), pytree.tree_leaves(changed), strict=True)
        self.has_changed |= any(not torch.equal(old, new) for old, new in pairs)
        if _is_in_place(func, collective):
            pytree.tree_map(lambda old, new: old.data.copy_(new), payload, changed)
            return func(**bound)
        self._sent.append(changed)
        return func(**{**bound, name: changed})

    def _changed(self, payload: Tensor) -> Tensor:
        """Return what is sent instead."""
        if self._fault.kind == "zero_rank":
            return torch.zeros_like(payload)
        if self._fault.kind == "shift":
            return shifted(payload.detach())
        return scaled(payload.detach(), self._fault.factor)

    def _dropped(self, func: Any, collective: Collective, bound: Bound) -> Any:
        """Let this rank go on with its own share."""
        self.has_changed |= collective.size > 1
        if func.namespace == "_c10d_functional":
            payload = _input(bound)[1]
            own = _OWN_SHARE[collective.operator]
            rank = dist.get_group_rank(_group(bound), dist.get_rank())
            if _is_in_place(func, collective):
                return payload
            found = pytree.tree_map_only(Tensor, lambda t: own(t, collective.size, rank), payload)
            return bound["out"].copy_(found) if "out" in bound else found
        if collective.operator in ("all_reduce", "broadcast", "reduce"):
            # The reducer reads its result from the operator's future: it has to be a real one.
            alone = _in_group(bound, self._instead)
            return func(**{**alone, **({"root_rank": 0} if "root_rank" in alone else {})})
        name, output = next((name, bound[name]) for name in _OUTPUTS if name in bound)
        elsewhere = pytree.tree_map_only(Tensor, torch.empty_like, output)
        self._sent.append(elsewhere)
        answer = func(**{**bound, name: elsewhere})
        rank = dist.get_group_rank(_group(bound), dist.get_rank())
        _fill(output, _input(bound)[1], collective, rank)
        return answer


def _fill(output: Any, payload: Any, collective: Collective, rank: int) -> None:
    """Write this rank's own share where a collective would have written everybody's.

    Lists hold one entry per tensor given in, and inside one per rank where ranks are apart.
    """
    if isinstance(output, Tensor):
        own = _OWN_SHARE[collective.operator](payload, collective.size, rank)
        output.data.copy_(own.reshape(output.shape))
        return
    for i, entry in enumerate(output):
        if isinstance(entry, (list, tuple)):  # gathered, per rank
            for part in entry:
                part.data.copy_(payload[i])
        elif isinstance(payload[i], (list, tuple)):  # scattered, per rank
            entry.data.copy_(payload[i][rank])
        else:
            _fill(entry, payload[i], collective, rank)


def _exchanged(payload: Tensor, _size: int, _rank: int) -> Tensor:
    return payload.clone()


_OWN_SHARE: Final[dict[str, Callable[[Tensor, int, int], Tensor]]] = {
    "all_reduce": _exchanged,
    "broadcast": _exchanged,
    "all_to_all": _exchanged,
    "all_gather": lambda payload, size, _rank: torch.cat([payload] * size),
    "reduce_scatter": lambda payload, size, rank: payload.chunk(size)[rank].clone(),
}


def _is_in_place(func: Any, collective: Collective) -> bool:
    """Say whether what comes back overwrites what was sent."""
    can_be = collective.operator in ("all_reduce", "broadcast", "reduce")
    return can_be and func._schema.name.endswith("_")


def _input(bound: Bound) -> tuple[str, Any]:
    """Return name and value of what a collective sends."""
    return next(((name, bound[name]) for name in _INPUTS if name in bound), ("", []))


def _group(bound: Bound) -> ProcessGroup:
    """Return the process group of a collective."""
    if "process_group" in bound:
        return ProcessGroup.unbox(bound["process_group"])
    name = bound["group_name"]
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if isinstance(name, str) else name


def _in_group(bound: Bound, group: Any) -> Bound:
    """Return the arguments of a collective with another group."""
    if "process_group" in bound:
        return {**bound, "process_group": group.boxed()}
    return {**bound, "group_name": group.group_name}


def _reduction(bound: Bound) -> str:
    """Return what a collective does with what it gets: `sum`, `avg`, ...; empty for nothing."""
    operation = bound.get("reduce_op")
    if operation is None or isinstance(operation, str):
        return operation or ""
    return str(dist.ReduceOp.RedOpType(operation.op()).name).lower()


def _user_line() -> str:
    """Return `file:line` of the innermost frame in the user's code, empty for none."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
