"""A model cut into stages: torch's `pipeline` splits its exported graph, a `Stage` runs a part.

What a later stage needs of an earlier one travels from each stage to the next; what it needs of
the batch (labels, masks) every rank has itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils import _pytree as pytree

from spmd_verify.errors import Unsupported
from spmd_verify.styles.torch_refusals import refusal

_INDEX: Final = "micro_batch"


@dataclass(frozen=True)
class Flow:
    """Which values of the split graph a stage takes and gives, by the name of their node.

    Attributes:
        arguments: What the stage's graph is called with, in order.
        received: What the stage before sends, in order.
        made: What the graph returns: `(name, position)`, position None for its only result.
        sent: What the next stage, or after the last one the loss, gets.
    """

    arguments: tuple[str, ...]
    received: tuple[str, ...]
    made: tuple[tuple[str, int | None], ...]
    sent: tuple[str, ...]


class Stage(nn.Module):
    """One stage: `forward(*received, micro_batch) -> sent`.

    Attributes:
        module: The stage's part of the exported model; its parameters are the model's own.
        flow: What it takes and gives.
        inputs: Per micro-batch, the batch's leaves by the name of the graph's input.
    """

    def __init__(self, module: nn.Module, flow: Flow) -> None:
        """Take a part of the split graph."""
        super().__init__()
        self.module = module
        self.flow = flow
        self.inputs: Sequence[Mapping[str, Any]] = ()

    def forward(self, *received: Tensor, micro_batch: Tensor) -> tuple[Tensor, ...]:
        """Run one micro-batch, named by a tensor of one index."""
        values = dict(self.inputs[int(micro_batch)])
        values.update(zip(self.flow.received, received, strict=True))
        result = self.module(*(values[name] for name in self.flow.arguments))
        for name, at in self.flow.made:
            values[name] = result if at is None else result[at]
        # Peers send and receive dense memory.
        return tuple(values[name].contiguous() for name in self.flow.sent)


@dataclass(frozen=True)
class SplitModel:
    """A model in stages.

    Attributes:
        stages: In order.
        inputs: Names of the graph's inputs, in the order of the leaves of `(args, kwargs)`.
        outputs: The leaves of the model's output: a name of what the last stage gives, or a
            constant.
        left: Parameters and buffers that no stage uses; the first one keeps them.
    """

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    left: tuple[str, ...]

    def output(self, given: Sequence[Tensor], spec: pytree.TreeSpec) -> Any:
        """Return the model's output from what the last stage gives."""
        values = dict(zip(self.stages[-1].flow.sent, given, strict=True))
        leaves = [values[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in self.outputs]
        return pytree.tree_unflatten(leaves, spec)

    def leaves(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the leaves of a micro-batch's arguments by the graph's names."""
        return dict(zip(self.inputs, pytree.tree_leaves((args, kwargs)), strict=True))


def split_model(
    style: str, model: nn.Module, links: Sequence[Sequence[str]], args: Any, kwargs: Any
) -> SplitModel:
    """Split a model in front of the first link of every stage but the first.

    Args:
        style: For messages.
        model: Whole; its modules are changed.
        links: What `stage_links` gave.
        args: Positional arguments of one micro-batch.
        kwargs: Keyword arguments.

    Raises:
        Unsupported: `torch-refuses`, where torch cannot export the model; `tied-stages`, where
            two stages use one parameter.
    """
    owners = {id(p): name for name, p in model.named_parameters()}
    cuts = {own[0]: SplitPoint.BEGINNING for own in links[1:]}
    try:
        pipe = pipeline(model, args, kwargs, split_spec=cuts)
    except RuntimeError as error:
        raise refusal(style, "torch.export of the model", error.__cause__ or error) from error
    parts = [cast("fx.GraphModule", pipe.get_stage_module(i)) for i in range(pipe.num_stages)]
    _refuse_tied(style, pipe.replicated_params)
    if len(parts) != len(links):
        raise Unsupported(
            f"{style} does not take this case: the exported graph has {len(parts)} parts where "
            f"the model is cut into {len(links)} stages at {', '.join(cuts)}. Use fewer stages",
            slug="no-chain",
        )
    graph = pipe.split_gm.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    outputs = tuple(next(node for node in graph.nodes if node.op == "output").args[0])
    # Parts that need nothing of each other stand in the split graph in any order.
    calls = {pipe.split_gm.get_submodule(str(n.target)): n for n in graph.nodes if _is_call(n)}
    flows = _flows([calls[part] for part in parts], inputs, outputs)
    for part in parts:
        # The first part keeps the model's signature; all are called with a flat list here.
        part.graph.set_codegen(fx.graph.CodeGen())
        part.recompile()
    stages = tuple(Stage(part, flow) for part, flow in zip(parts, flows, strict=True))
    left = _keep_unused(stages, model, owners)
    return SplitModel(stages, tuple(node.name for node in inputs), outputs, left)


def _is_call(node: fx.Node) -> bool:
    """Say whether a node of the split graph runs a part."""
    return node.op == "call_module"


def _refuse_tied(style: str, replicated: Iterable[Mapping[str, str]]) -> None:
    """Refuse parameters that several stages use: every stage would train a copy of its own.

    Raises:
        Unsupported: `tied-stages`.
    """
    for uses in replicated:
        shown = " and ".join(
            f"{name} of stage {part.rpartition('_')[2]}" for part, name in uses.items()
        )
        raise Unsupported(
            f"{style} does not take this case: two stages use one parameter, {shown}, and each "
            f"would train a copy. Untie them, or use so few stages that one has both",
            slug="tied-stages",
        )


def _flows(
    calls: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[Any]
) -> list[Flow]:
    """Return what every stage takes and gives; values travel from stage to stage."""
    made: list[dict[str, int | None]] = []
    for call in calls:
        items = [user for user in call.users if user.target is operator.getitem]
        own: dict[str, int | None] = {item.name: cast("int", item.args[1]) for item in items}
        made.append(own or {call.name: None})
    given = {node.name for node in inputs}
    needs = [[arg.name for arg in call.args if isinstance(arg, fx.Node)] for call in calls]
    wanted = [leaf.name for leaf in outputs if isinstance(leaf, fx.Node)]
    flows = []
    received: tuple[str, ...] = ()
    for at in range(len(calls)):
        known = [*received, *made[at]]
        later = {name for need in [*needs[at + 1 :], wanted] for name in need}
        is_last = at == len(calls) - 1
        sent = wanted if is_last else [name for name in known if name in later - given]
        flows.append(
            Flow(
                tuple(needs[at]),
                received,
                tuple(made[at].items()),
                tuple(dict.fromkeys(sent)),
            )
        )
        received = flows[-1].sent
    return flows


def _keep_unused(
    stages: Sequence[Stage], model: nn.Module, owners: Mapping[int, str]
) -> tuple[str, ...]:
    """Give the first stage what none uses: it is trained, and compared, all the same."""
    held = {id(p) for stage in stages for p in stage.parameters()}
    buffers = {name for stage in stages for name, _ in stage.module.named_buffers()}
    left = [name for key, name in owners.items() if key not in held]
    for name in left:
        _attach(stages[0].module, name, model.get_parameter(name))
    for name, buffer in model.named_buffers():
        if name not in buffers:
            _attach(stages[0].module, name, buffer)
    return tuple(left)


def _attach(root: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or buffer where the model has it, making the modules on the way."""
    *path, last = name.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value)


def run_through(split: SplitModel) -> list[tuple[Tensor, ...]]:
    """Return what each stage sends for the first micro-batch, all run one after the other here.

    Every stage's inputs are leaves of its own graph; buffers that change are restored.
    """
    found = []
    buffers = [buffer for stage in split.stages for buffer in stage.buffers()]
    before = [buffer.clone() for buffer in buffers]
    values: tuple[Tensor, ...] = ()
    for stage in split.stages:
        sent = stage(*values, **{_INDEX: torch.tensor([0])})
        values = tuple(value.detach().requires_grad_(value.requires_grad) for value in sent)
        found.append(values)
    with torch.no_grad():
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
    return found


def examples(split: SplitModel) -> list[tuple[Tensor, ...]]:
    """Return what each stage sends, without values: sizes, and where gradients flow."""
    return [
        tuple(
            torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            ).requires_grad_(value.requires_grad)
            for value in values
        )
        for values in run_through(split)
    ]
