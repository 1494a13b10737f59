"""Derive a tensor-parallel plan for a model that brings none: right for any, good for most.

Every linear layer and embedding whose parameters only its own forward reads is split. Layers
that feed each other without a sum over the split dim (the halves of a feed-forward layer,
q, k and v with the output projection) stay split in between where a trial shows that they may
(`tp_trial`); everywhere else outputs are gathered and inputs split, which is right whatever the
code between does. What no entry names is replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.model_build import evaluating
from spmd_verify.styles.tp_trial import Linear, can_stay_split, is_tokenwise, linear_of
from spmd_verify.styles.tp_watch import Call, Watched, watching

# How one module is split. `column` and `row` belong to a group that stays split in between.
COLUMN: Final = "column"
ROW: Final = "row"
COLUMN_GATHERED: Final = "column gathered"
ROW_SCATTERED: Final = "row scattered"
SEQUENCE: Final = "sequence"
_ALONE: Final = {COLUMN: COLUMN_GATHERED, ROW: ROW_SCATTERED}
# Columns that one row-wise layer may take, most first: q, k, v; gate and up; a plain pair.
_GROUP_SIZES: Final = (3, 2, 1)


@dataclass(frozen=True)
class Entry:
    """How one module is split.

    Attributes:
        how: One of the words above.
        group: The row-wise layer that takes the columns, or the first module of those that share
            a weight; "" for none.
        dim: For `sequence`: the dim of the input that is split.
        is_transposed: The weight is `[in, out]`; see `tp_trial.Linear`.
    """

    how: str
    group: str = ""
    dim: int = 0
    is_transposed: bool = False


@dataclass(frozen=True)
class Derived:
    """A plan, and who uses which parameter.

    Attributes:
        entries: By module path.
        uses: By parameter name, the modules whose forward reads it.
    """

    entries: dict[str, Entry]
    uses: dict[str, frozenset[str]]


def derive(case: LoadedCase, part: Callable[[Any], Any], ranks: int, has_norms: bool) -> Derived:
    """Rehearse a step and an eval forward, and derive a plan all ranks have. Collective.

    Where the file brings a plan, only who uses which parameter is found out.

    Args:
        case: The case.
        part: Gives this rank's part of a global batch.
        ranks: Ranks along the axis that splits weights.
        has_norms: Whether norms are split along the sequence.
    """
    model = case.build_model()
    batch = part(case.batch(0))
    case.seed_step(0)
    with watching(model) as seen:
        case.step(model, case.optimizer(model), batch)
    args, kwargs, _ = case.split(batch)
    with evaluating(model), torch.no_grad(), case.factory_mode(), watching(model) as evaluated:
        model(*args, **kwargs)
    for name, users in evaluated.uses.items():
        seen.uses.setdefault(name, set()).update(users)
    entries: dict[str, Entry] = {}
    with case.factory_mode():
        if case.hooks.tp_plan is None:
            entries = dict(_Plan(model, seen, ranks).entries())
        if case.hooks.tp_plan is None and has_norms:
            entries |= dict(_norms(model, seen, entries, ranks))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (entries, seen.uses))
    uses: dict[str, set[str]] = {}
    for _, found in everyone:
        for name, users in found.items():
            uses.setdefault(name, set()).update(users)
    common = agreed([found for found, _ in everyone])
    return Derived(common, {name: frozenset(users) for name, users in uses.items()})


def agreed(plans: Sequence[dict[str, Entry]]) -> dict[str, Entry]:
    """Return what all ranks derived; groups that not all have fall apart, ties are left whole."""
    first = plans[0]
    common = {
        path: entry
        for path, entry in first.items()
        if all(plan.get(path) == entry for plan in plans)
    }
    broken = {e.group for plan in plans for p, e in plan.items() if common.get(p) != e and e.group}
    kept = {path: entry for path, entry in common.items() if entry.group not in broken}
    for path, entry in common.items():
        if path not in kept and entry.how in _ALONE:
            kept[path] = Entry(_ALONE[entry.how], is_transposed=entry.is_transposed)
    return kept


class _Plan:
    """The linear layers and embeddings of one model."""

    def __init__(self, model: nn.Module, seen: Watched, ranks: int) -> None:
        self.model, self.seen, self.ranks = model, seen, ranks
        self.modules = dict(model.named_modules())
        self.owners: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Give the modules to split."""
        simple = [path for path in self.seen.calls if path and self._is_closed(path)]
        linears = [linear for path in simple if (linear := self._linear(path)) is not None]
        embeddings = [path for path in simple if self._is_embedding(path)]
        known = {linear.path: linear for linear in linears} | dict.fromkeys(embeddings)
        alone = [linear for linear in linears if not self._is_tied(linear.path)]
        grouped = dict(self._groups(alone))
        yield from grouped.items()
        yield from self._single([each for each in alone if each.path not in grouped])
        for path in embeddings:
            if not self._is_tied(path):
                yield from self._embedding(path)
        yield from self._tied(known)

    def _is_closed(self, path: str) -> bool:
        """Say whether only the forwards of a module and of its ties read its parameters."""
        module = self.modules[path]
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own or any(True for _ in module.children()):
            return False
        return all(
            self.seen.uses.get(f"{path}.{name}", set())
            <= set(self.owners[id(getattr(module, name))])
            for name in own
        )

    def _is_tied(self, path: str, besides: Any = None) -> bool:
        """Say whether a module shares a parameter, besides a known one."""
        own = self.modules[path].parameters(recurse=False)
        return any(len(self.owners[id(p)]) > 1 for p in own if p is not besides)

    def _linear(self, path: str) -> Linear | None:
        """Return a linear layer."""
        return linear_of(path, self.modules[path], self.seen.calls[path])

    def _is_embedding(self, path: str) -> bool:
        """Say whether a module is a lookup that does not change its table."""
        module = self.modules[path]
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            return False
        calls = self.seen.calls[path]
        is_plain = all(len(call.args) == 1 and not call.kwargs for call in calls)
        is_whole = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return is_plain and is_whole

    def _groups(self, linears: Sequence[Linear]) -> Iterator[tuple[str, Entry]]:
        """Give the groups that stay split, in the order of their calls."""
        free: list[Linear] = []
        for row in linears:
            columns = next(
                (
                    free[-size:]
                    for size in _GROUP_SIZES
                    if size <= len(free) and self._is_group(free[-size:], row)
                ),
                [],
            )
            if not columns:
                free.append(row)
                continue
            free = free[: -len(columns)]
            for column in columns:
                is_transposed = column.is_transposed
                yield column.path, Entry(COLUMN, row.path, is_transposed=is_transposed)
            yield row.path, Entry(ROW, row.path, is_transposed=row.is_transposed)

    def _is_group(self, columns: Sequence[Linear], row: Linear) -> bool:
        """Say whether columns may stay split until a row-wise layer."""
        sizes = [column.num_outputs for column in columns]
        if row.num_inputs not in sizes or any(s % self.ranks for s in [*sizes, row.num_inputs]):
            return False
        calls = [self.seen.calls[each.path] for each in (*columns, row)]
        inside = calls[-1][0].inside
        shared = [path for path in inside if all(path in own[0].inside for own in calls)]
        if not shared:
            return False
        outer = shared[-1]
        outer_calls = self.seen.calls[outer]
        if any(len(own) != len(outer_calls) for own in calls):
            return False
        tried = (outer_calls[0], outer_calls[-1]) if len(outer_calls) > 1 else outer_calls
        module = self.modules[outer]
        return all(
            can_stay_split(self.model, module, call, columns, row, self.ranks) for call in tried
        )

    def _single(self, linears: Sequence[Linear]) -> Iterator[tuple[str, Entry]]:
        """Give layers on their own: of several in one module the last one row-wise."""
        by_parent: dict[str, list[Linear]] = {}
        for linear in linears:
            by_parent.setdefault(linear.path.rpartition(".")[0], []).append(linear)
        for linear in linears:
            siblings = by_parent[linear.path.rpartition(".")[0]]
            is_last = len(siblings) > 1 and linear is siblings[-1]
            sizes = {COLUMN_GATHERED: linear.num_outputs, ROW_SCATTERED: linear.num_inputs}
            order = reversed(sizes) if is_last else iter(sizes)
            how = next((each for each in order if sizes[each] >= self.ranks), None)
            if how is not None:
                yield linear.path, Entry(how, is_transposed=linear.is_transposed)

    def _embedding(self, path: str) -> Iterator[tuple[str, Entry]]:
        """Give an embedding: by vocabulary, or by width where a row of it is kept from training."""
        module: Any = self.modules[path]
        if module.padding_idx is None and module.num_embeddings >= self.ranks:
            yield path, Entry(ROW_SCATTERED)
        elif module.embedding_dim >= self.ranks:
            yield path, Entry(COLUMN_GATHERED)

    def _tied(self, known: dict[str, Linear | None]) -> Iterator[tuple[str, Entry]]:
        """Give the modules that share one weight, all of them split along the same dim of it.

        Dim 0 is the vocabulary: an embedding looks up row-wise, a linear layer computes columns.
        """
        for paths in self.owners.values():
            if len(paths) < 2 or not all(path in known for path in paths):
                continue
            modules = [self.modules[path] for path in paths]
            linears = [linear for path in paths if (linear := known[path]) is not None]
            if any(linear.is_transposed for linear in linears):
                continue
            if any(self._is_tied(path, besides=modules[0].weight) for path in paths):
                continue  # a bias that others have too
            shape: Any = modules[0].weight.shape
            is_padded = any(getattr(module, "padding_idx", None) is not None for module in modules)
            dim = 1 if is_padded or shape[0] < self.ranks else 0
            if shape[dim] < self.ranks:
                continue
            for path in paths:
                is_column = (known[path] is not None) == (dim == 0)
                yield path, Entry(COLUMN_GATHERED if is_column else ROW_SCATTERED, paths[0])


def _norms(
    model: nn.Module, seen: Watched, entries: dict[str, Entry], ranks: int
) -> Iterator[tuple[str, Entry]]:
    """Give the modules that may see only a part of the sequence: norms, above all.

    Parameters of one dim, one tensor in, one of the same shape out, and every index of the dim
    before the last computed on its own.
    """
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        calls = seen.calls.get(path, [])
        own = list(module.parameters())
        if not path or path in entries or not calls or not own:
            continue
        is_own = all(p.ndim == 1 and p.requires_grad and counts[id(p)] == 1 for p in own)
        if not is_own or any(True for _ in module.children()):
            continue
        if all(_has_sequence(call, ranks) for call in calls):
            dim = calls[0].args[0].ndim - 2
            if all(is_tokenwise(module, call, dim) for call in calls[:1]):
                yield path, Entry(SEQUENCE, dim=dim)


def _has_sequence(call: Call, ranks: int) -> bool:
    """Say whether a call has one tensor whose dim before the last every rank gets a part of."""
    if len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], Tensor):
        return False
    x = call.args[0]
    return x.is_floating_point() and x.ndim in (2, 3) and x.shape[-2] >= ranks
