"""Whether two captures of a step are the same program."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from spmd.program import Program, signature_of
from spmd.results import Built


def fingerprint(program: Program) -> str:
    """Return a text that two captures share if one graph can stand for both.

    It covers operators and their order, constants, guards, inputs and outputs, the
    result's structure and its Python leaves, and what the step changed in Python. Names of
    nodes do not count. Tensors the step found in a slot count by where they lie, others, which
    it may have made from Python numbers, by value.
    """
    lines = [*_graph_lines(program), *_effect_lines(program)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def difference(first: Program, second: Program) -> str | None:
    """Return the first line in which two programs differ, for reports; None if none does."""
    for program_lines in (_graph_lines, _effect_lines):
        ours, theirs = program_lines(first), program_lines(second)
        for left, right in zip(ours, theirs, strict=False):
            if left != right:
                return f"{left} / {right}"
        if len(ours) != len(theirs):
            return f"{len(ours)} / {len(theirs)} nodes"
    return None


def _graph_lines(program: Program) -> list[str]:
    signature = signature_of(program.graph)
    number = {node: f"%{i}" for i, node in enumerate(program.graph.graph.nodes)}
    lines = [f"{spec}" for spec in signature.inputs] + [f"{spec}" for spec in signature.outputs]
    named = {node.name: text for node, text in number.items()}
    lines += [f"{name} {named.get(node)}" for name, node in signature.gradients.items()]
    first_captured = len(signature.inputs) - len(program.captured)
    position = 0
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{number[node]} {_placeholder(node, program, position - first_captured)}")
            position += 1
            continue
        args = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: _leaf(leaf, number))
        lines.append(f"{number[node]} {node.op} {node.target} {args}")
    return lines


def _placeholder(node: fx.Node, program: Program, index: int) -> str:
    value = node.meta.get("val")
    text = f"{tuple(getattr(value, 'shape', ()))} {getattr(value, 'dtype', '')}"
    if index < 0:
        return text
    tensor, place = program.captured[index], program.captured_places[index]
    if place is not None:
        return f"{text} at {place.name}"
    return f"{text} {_digest(tensor)}"


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()


def _leaf(leaf: Any, number: dict[fx.Node, str]) -> Any:
    """Return a leaf of a node's arguments so that equal values print alike."""
    if isinstance(leaf, fx.Node):
        return number[leaf]
    if isinstance(leaf, float):
        return leaf.hex()
    if isinstance(leaf, Tensor):
        return _digest(leaf)
    return leaf


def _effect_lines(program: Program) -> list[str]:
    state = pytree.tree_map(_plain, program.new_state)
    return [
        str(program.result_spec),
        str([_plain(leaf) for leaf in program.result_constants]),
        str(state),
        str(program.cleared_gradients),
        str([(w.kind, w.place.name, pytree.tree_map(_plain, w.value)) for w in program.writes]),
        str([(name, _plain(value)) for name, (_, value) in program.python.items()]),
        str(program.requires_grad),
    ]


def _plain(value: Any) -> Any:
    """Return a value so that equal ones print alike; addresses of objects do not count."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Built):
        parts = {
            k: [_plain(leaf) for leaf in leaves] for k, (_, leaves) in value.attributes.items()
        }
        return f"{_plain(value.prototype)} {parts}"
    return _ADDRESS.sub("", repr(value))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
