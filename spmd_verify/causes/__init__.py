"""Why a tensor differs: hypotheses tested on an exhibit, the most specific first.

Each hypothesis is `(Exhibit, Row) -> Cause | None`: a cause where it leaves only noise of the
first diverging tensor, tried in the order of `BY_STAGE`. Kinds: verdicts.md part 7. Nothing is
guessed: where none holds, the cause is `unexplained` and carries the row's ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from spmd_verify.causes import (
    averages,
    backward,
    calls,
    clips,
    exchanged,
    forward,
    fused,
    gathered,
    gradients,
    heads,
    local_indices,
    means,
    norms_of_parts,
    order,
    patterns,
    positions,
    shards,
    state,
    unreduced,
    updates,
    words,
)
from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.record import Cause, Row

Hypothesis = Callable[[Exhibit, Row], Cause | None]

FORWARD: Final[Sequence[Hypothesis]] = (
    forward.batch_statistics,
    forward.random_stream,
    forward.additive_bias,
    order.rows_before,
    unreduced.unreduced_output,
    unreduced.summed_over_other,
    patterns.layout,
    forward.whole_factor,
    norms_of_parts.channel_blocks,
    positions.position,
    local_indices.counted_from_zero,
    fused.fused_projection,
    heads.heads,
    forward.coupled_samples,
    patterns.precision,
    order.rows_weighted,
    gathered.gathered,
)
LOSS: Final[Sequence[Hypothesis]] = (
    forward.random_stream,
    means.mean_of_means,
    means.cross_sample,
    positions.shard_as_sequence,
    local_indices.shards_as_sequences,
    means.mean_of_sample_means,
    forward.additive_loss,
    means.own_denominators,
    means.factor_of_mean,
    forward.whole_factor,
    unreduced.unreduced_output,
    fused.fused_projection,
    local_indices.counted_from_zero,
    order.labels_of_others,
    patterns.precision,
)
GRADIENTS: Final[Sequence[Hypothesis]] = (
    clips.clipped_before_reduction,
    clips.clipped,
    gradients.tied,
    gradients.stale,
    calls.rescaled_alike,
    gradients.uniform_factor,
    gradients.unused,
    shards.missing_reduction,
    gradients.own_data,
    exchanged.reduced_to_some,
    exchanged.other_operation,
    means.mean_of_means,
    means.mean_of_sample_means,
    calls.rescaled,
    gradients.weighted_ranks,
    shards.doubled_rows,
    gradients.loss_term,
    patterns.layout,
    exchanged.exchanged,
    gradients.random_stream,
    means.cross_sample,
    backward.kept_gradient,
    order.gradients_of_others,
    patterns.precision,
    positions.gradient_rows,
)
CLIPPING: Final[Sequence[Hypothesis]] = (clips.clipping,)
STATE: Final[Sequence[Hypothesis]] = (
    clips.never_clipped,
    patterns.precision,
    exchanged.exchanged,
    state.optimizer_state,
)
PARAMETERS: Final[Sequence[Hypothesis]] = (
    updates.frozen_moved,
    updates.without_gradient,
    clips.never_clipped,
    updates.rate_in_step,
    updates.stale,
    averages.of_old_values,
    updates.optimizer_on_shards,
    updates.partly_stale,
    patterns.layout,
    patterns.flat_offset,
    exchanged.exchanged,
    updates.scaled_update,
    updates.scaled_value,
    updates.replicas_drift,
    patterns.precision,
    updates.update_wrong,
)
BY_STAGE: Final[dict[str, Sequence[Hypothesis]]] = {
    "inputs": (state.inputs,),
    "initial_state": (state.initial,),
    "module_outputs": FORWARD,
    "loss": LOSS,
    "gradients": GRADIENTS,
    "clipping": CLIPPING,
    "optimizer_state": STATE,
    "parameters": PARAMETERS,
    "buffers": (state.buffer,),
    "eval_outputs": FORWARD,
}


# A tensor of few elements decides little: so many larger ones are asked instead.
MOST_OTHERS: Final = 2
# More rows than this are not asked for the same cause.
MOST_ROWS: Final = 48
# Stages whose causes are about the values computed from them: those are named too.
_UPSTREAM: Final = ("inputs", "module_outputs", "loss")


def find(exhibit: Exhibit, row: Row) -> Cause | None:
    """Return the cause of the first divergence, None where no hypothesis holds."""
    if not exhibit.is_known(row) and row.stage != "inputs":
        return state.only_here(exhibit, row)
    before = clips.unclipped(exhibit) if row.stage == "gradients" else None
    if before is not None:
        return _before_clipping(*before, row)
    others = [r for r in exhibit.mismatches(row.stage) if r.name != row.name]
    others.sort(key=lambda r: -math.prod(r.shape))
    for tested in (row, *others[:MOST_OTHERS]):
        for hypothesis in BY_STAGE.get(row.stage, ()):
            found = hypothesis(exhibit, tested)
            # What was fitted on another tensor must explain this one too.
            if found is not None and row.name in found.tensors:
                _extend(exhibit, tested, hypothesis, found)
                return found
    return None


def _before_clipping(exhibit: Exhibit, left: list[Row], clipped: str, row: Row) -> Cause:
    """Return the cause of the gradients that are wrong before a clipping that scales all."""
    names = words.names_of(left)
    found = find(exhibit, left[0])
    if found is None:
        text = f"no known cause fits {words.listed(names)}"
        found = words.cause("unexplained", text, tensors=names, ranks=row.ranks)
    found.text = f"before clipping: {found.text}; the other gradients are {clipped}"
    found.tensors.extend(name for name in names if name not in found.tensors)
    return found


def _extend(exhibit: Exhibit, row: Row, hypothesis: Hypothesis, found: Cause) -> None:
    """Add the tensors of the same stage that the same hypothesis explains, in place."""
    more: list[str] = []
    if row.stage in _UPSTREAM:
        more = forward.affected(exhibit)
    else:
        for other in exhibit.mismatches(row.stage)[:MOST_ROWS]:
            if other.name in found.tensors or other.name in more:
                continue
            own = hypothesis(exhibit, other)
            if own is not None and own.kind == found.kind:
                more.append(other.name)
    more = [name for name in more if name not in found.tensors]
    if more:
        found.tensors.extend(more)
    if row.step > 0:
        found.text += f" (first in step {row.step})"
    unsaid = [name for name in found.tensors if name not in found.text]
    if unsaid:
        found.text += f" (also {words.listed(unsaid)})"
