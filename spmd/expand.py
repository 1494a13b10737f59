"""Turn the global graph into the graph every rank runs: one pass, rules for placements.

The pass keeps, for every global value, the local nodes that hold it and in which layout.
An operator runs where the cheapest rule says; a value that was redistributed keeps both
forms, so nothing is communicated twice.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from spmd.eligible import (
    all_replicated,
    candidates_of,
    compatible,
    region_of,
    rounds_partial_sums,
)
from spmd.emit import Emitter
from spmd.errors import StrictFallbackError
from spmd.layout import Layout, Partial, Replicate, Shard, local_shape, replicated
from spmd.mesh import MeshShape
from spmd.narrowing import narrowed
from spmd.plan import Plan, Value, move_cost
from spmd.program import Signature, signature_of
from spmd.redistribute import redistribute
from spmd.rules import Call, Candidate, Rule, Whole, find_rule

aten = torch.ops.aten

# Views and casts of a parameter: cheap to do again, so what backward needs of them is
# rebuilt from the parameter instead of being kept from forward.
_CHEAP = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten._to_copy.default,
    aten.expand.default, aten.select.int, aten.slice.Tensor, aten._unsafe_view.default,
    aten.reshape.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int, aten.squeeze.dims, aten.view_as_real.default,
}  # fmt: skip


_REDUCTIONS = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def expand(graph: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Return the local graph of `graph` under `plan`.

    Args:
        graph: Functional global graph with its signature.
        plan: The mode's decisions.

    Returns:
        A graph with the same signature. Its meta has `layouts` (inputs and outputs),
        `fallbacks` (operator -> count), `calls` (operator calls in the global graph) and
        `mesh`; every node's meta names its global node (`global`), that node's layout,
        and the user's line.

    Raises:
        StrictFallbackError: An operator has no rule and the plan is strict.
    """
    return _Expansion(graph, plan).run()


class _Expansion:
    def __init__(self, graph: fx.GraphModule, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.signature: Signature = signature_of(graph)
        self.mesh = plan.mesh
        self.whole = replicated(len(plan.mesh.sizes))
        self.emitter = Emitter(plan.mesh)
        self.nodes = {node.name: node for node in graph.graph.nodes}
        self.values: dict[Any, Any] = {}
        self.origin: dict[fx.Node, bool] = {}
        self.fallbacks: Counter[str] = Counter()
        self.gradient_names: dict[str, tuple[str, ...]] = {}
        for name, node_name in self.signature.gradients.items():
            known = self.gradient_names.get(node_name, ())
            self.gradient_names[node_name] = (*known, name)
        self.calls = 0

    def run(self) -> fx.GraphModule:
        placeholders = iter(range(len(self.plan.inputs)))
        for node in self.graph.graph.nodes:
            self.emitter.enter(node)
            if node.op == "placeholder":
                self._placeholder(node, next(placeholders))
            elif node.op == "output":
                layouts = self._output(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node, region_of(node))
                self._cut(node)
                self._pin_gradient(node)
        local = self.emitter.finish()
        local.meta.update(
            signature=self.signature,
            layouts={"inputs": list(self.plan.inputs), "outputs": layouts},
            fallbacks=dict(self.fallbacks),
            calls=self.calls,
            mesh=self.mesh,
        )
        return local

    # -- inputs and outputs ----------------------------------------------------------

    def _placeholder(self, node: fx.Node, position: int) -> None:
        fake = node.meta["val"]
        layout = self.plan.inputs[position]
        local = self.emitter.placeholder(node, layout)
        value = Value(tuple(fake.shape), fake.dtype, {layout: local}, node.name)
        self.values[node] = value
        if position in self.plan.compute and self.plan.compute[position] != layout:
            self.origin[node] = True
            self.values[node, "optimizer"] = value
            self.values[node, "compute"] = self.plan.compute[position]

    def _output(self, node: fx.Node) -> list[Layout]:
        layouts, results = [], []
        for position, leaf in enumerate(node.args[0]):
            value = self._resolve(leaf, "optimizer") if isinstance(leaf, fx.Node) else leaf
            if not isinstance(value, Value):
                layouts.append(self.whole)
                results.append(value)
                continue
            wanted = self.plan.outputs[position] if self.plan.outputs else None
            if wanted is None:
                wanted = self._settled(value)
            layouts.append(wanted)
            results.append(self._form(value, wanted))
        self.emitter.output(results)
        return layouts

    def _settled(self, value: Value) -> Layout:
        """Return a layout the value has or can have by reducing it: never a partial one."""
        for layout in value.forms:
            if not layout.has_partial:
                return layout
        first = next(iter(value.forms))
        return Layout(
            tuple(p if not isinstance(p, Partial) else Replicate() for p in first.placements)
        )

    def _cut(self, node: fx.Node) -> None:
        """Bring a value to where the plan wants it; what reads it follows."""
        if node.name in self.plan.cuts:
            value: Value = self.values[node]
            wanted = next(iter(value.forms)).replace(*self.plan.cuts[node.name])
            value.forms = {wanted: self._form(value, wanted)}

    def _pin_gradient(self, node: fx.Node) -> None:
        """Reduce a finished gradient where it stands, to where its parameter lives.

        Only backward still sees it as it was computed: a normalisation's bias gradient is
        also a statistic of its input's gradient, and must not be gathered for that.
        """
        wanted = self.plan.gradients.get(node.name)
        value = self.values[node]
        if wanted is None or not isinstance(value, Value):
            return
        computed = dict(value.forms)
        if self.plan.mean:
            value.forms = self._averaged(value)
        value.forms = {wanted: self._form(value, wanted)}
        self._tag_reductions(value.forms[wanted], node, value)
        if self.plan.mean or (wanted != self.whole and wanted not in computed):
            self.values[node, "computed"] = Value(value.shape, value.dtype, computed, value.name)

    def _averaged(self, value: Value) -> dict[Layout, fx.Node]:
        """Return a rank's own gradient as its share of the mean over all ranks."""
        local = self._form(value, self.whole)
        share = self.emitter.call(aten.div.Tensor, (local, float(self.mesh.num_ranks)), {})
        return {Layout((Partial("sum"),) * len(self.mesh.sizes)): share}

    def _tag_reductions(self, local: fx.Node, node: fx.Node, value: Value) -> None:
        """Mark the collectives that reduce this gradient, for the passes."""
        pending, names = [local], self.gradient_names[node.name]
        while pending:
            current = pending.pop()
            if (
                current.meta.get("global") not in (node.name, value.name)
                or "gradient" in current.meta
            ):
                continue
            if current.target in _REDUCTIONS:
                current.meta["gradient"] = {
                    "names": names, "dtype": value.dtype, "bytes": value.bytes
                }  # fmt: skip
            elif current.op == "call_function":
                pending += current.all_input_nodes

    # -- values ----------------------------------------------------------------------

    def _resolve(self, node: fx.Node, region: str) -> Any:
        """Return the value of a global node as `region` sees it.

        Parameters that live sharded are gathered for forward and, where they are freed,
        again for backward; cheap views of them are rebuilt there.
        """
        if not self.origin.get(node):
            if region == "backward" and (node, "computed") in self.values:
                return self.values[node, "computed"]
            return self.values[node]
        if region == "optimizer":
            return (
                self.values[node, "optimizer"]
                if (node, "optimizer") in self.values
                else self._rebuilt(node, region)
            )
        if region == "backward" and not self.plan.regather:
            region = "forward"
        if (node, region) not in self.values:
            if node.op == "placeholder":
                home: Value = self.values[node, "optimizer"]
                wanted: Layout = self.values[node, "compute"]
                scratch = Value(home.shape, home.dtype, dict(home.forms), home.name)
                gathered = self._form(scratch, wanted)
                self.values[node, region] = Value(
                    home.shape, home.dtype, {wanted: gathered}, home.name
                )
            else:
                self._rebuilt(node, region)
        return self.values[node, region]

    def _rebuilt(self, node: fx.Node, region: str) -> Any:
        if (node, region) not in self.values:
            self.values[node, region] = self._call(node, region)
        return self.values[node, region]

    def _form(self, value: Value, layout: Layout) -> fx.Node:
        """Return a local node that holds `value` in `layout`, redistributing if need be."""
        if layout not in value.forms:
            part = self._narrowed(value, layout)
            if part is not None:
                value.forms[layout] = part
                return part
            source = min(value.forms, key=lambda have: self._cost(value, have, layout))
            steps = redistribute(self.emitter, value.forms[source], value, source, layout)
            for reached, node in steps:
                node.meta["layout"] = reached
                node.meta["global"] = value.name
                value.forms.setdefault(reached, node)
        return value.forms[layout]

    def _narrowed(self, value: Value, layout: Layout) -> fx.Node | None:
        """Return a part of a replicated constant made as such, None where it is none."""
        node = self.nodes.get(value.name)
        if node is None or node.op != "call_function" or self.whole not in value.forms:
            return None
        region = region_of(node)
        return narrowed(self.emitter, node, layout, lambda n: self._resolve(n, region))

    def _cost(self, value: Value, have: Layout, wanted: Layout) -> float:
        pairs = zip(have.placements, wanted.placements, self.mesh.sizes, strict=True)
        return sum(move_cost(value.bytes, a, b, n) for a, b, n in pairs)

    # -- operators -------------------------------------------------------------------

    def _call(self, node: fx.Node, region: str) -> Any:
        if node.target is _getitem:
            source = self._resolve(node.args[0], region)
            self.origin[node] = bool(self.origin.get(node.args[0]))
            if isinstance(source, (list, tuple)):
                return source[node.args[1]]
        operands = _tensor_operands(node)
        self.origin[node] = (
            bool(operands) and node.target in _CHEAP and all(self.origin.get(n) for n in operands)
        )
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._scalar(node, region)
        self.calls += 1
        values = [self._resolve(n, region) for n in operands]
        fakes = tuple(n.meta["val"] for n in operands)
        # Under DDP's definition a whole gradient is one rank's own: no part of it is finished.
        gradient = None if self.plan.mean else self.plan.gradients.get(node.name)
        call = Call(node, fakes, _outputs(node.meta.get("val")), self.plan.local_draws, gradient)
        rule = find_rule(call)
        if rule is None:
            self._count_fallback(node)
            rule = _WHOLE
        inputs, outputs = self._choose(rule, call, values)
        return self._emit(rule, call, values, inputs, outputs, region)

    def _scalar(self, node: fx.Node, region: str) -> Any:
        """Python arithmetic on numbers and guards: the same on every rank."""

        def local(leaf: fx.Node) -> Any:
            value = self._resolve(leaf, region)
            return self._form(value, self.whole) if isinstance(value, Value) else value

        args = fx.node.map_arg(node.args, local)
        kwargs = fx.node.map_arg(node.kwargs, local)
        return self.emitter.call(node.target, args, kwargs)

    def _count_fallback(self, node: fx.Node) -> None:
        name = str(node.target)
        if self.plan.strict:
            line = self.signature.source_lines.get(node.name, "an unknown line")
            raise StrictFallbackError(
                f"Operator {name} (node {node.name}, {line}) has no sharding rule and strict=True "
                "forbids gathering its inputs. Use strict=False or another operator."
            )
        self.fallbacks[name] += 1

    def _choose(
        self, rule: Rule, call: Call, values: list[Value]
    ) -> tuple[list[Layout], list[Layout]]:
        """Return the cheapest layouts of the operands and of the outputs, axis by axis."""
        inputs = [self.whole] * len(values)
        outputs = [self.whole] * len(call.outputs)
        for axis, num_ranks in enumerate(self.mesh.sizes):
            forms = [
                list(dict.fromkeys(layout.placements[axis] for layout in v.forms)) for v in values
            ]
            best = all_replicated(len(values), len(call.outputs))
            best_cost = self._price(best, call, values, forms, num_ranks)
            for candidate in candidates_of(rule, call, forms, num_ranks):
                if not compatible(candidate, inputs, outputs, axis):
                    continue
                if rounds_partial_sums(candidate, call):
                    continue
                cost = self._price(candidate, call, values, forms, num_ranks)
                if cost < best_cost:
                    best, best_cost = candidate, cost
            inputs = [x.replace(axis, p) for x, p in zip(inputs, best.inputs, strict=True)]
            outputs = [x.replace(axis, p) for x, p in zip(outputs, best.outputs, strict=True)]
        return inputs, outputs

    def _price(
        self, candidate: Candidate, call: Call, values: list[Value], forms: Any, num_ranks: int
    ) -> float:
        """Bytes moved, plus a thousandth of the bytes computed, plus a little per partial."""
        cost = 0.0
        for value, have, wanted in zip(values, forms, candidate.inputs, strict=True):
            cost += min(move_cost(value.bytes, p, wanted, num_ranks) for p in have)
        for fake, placement in zip(call.outputs, candidate.outputs, strict=True):
            if fake is not None:
                size = fake.numel() * fake.dtype.itemsize
                cost += 1e-3 * (size / num_ranks if isinstance(placement, Shard) else size)
                cost += 1e-4 * size * isinstance(placement, Partial) + 1e-6
        if call.node.name not in self.plan.gradients:
            # A finished gradient is reduced where it stands, so that it is bucketed.
            cost += 2 * _growth(candidate, values, forms, call.outputs)
        work = sum(v.bytes for v in values)
        divided = any(isinstance(p, Shard) for p in candidate.inputs)
        return cost + 1e-3 * (work / num_ranks if divided else work)

    def _emit(
        self, rule: Rule, call: Call, values: list[Value], inputs: list[Layout],
        outputs: list[Layout], region: str,
    ) -> Any:  # fmt: skip
        operand_nodes = iter(
            [self._form(v, layout) for v, layout in zip(values, inputs, strict=True)]
        )

        def local(leaf: fx.Node) -> Any:
            if _is_tensor(leaf):
                return next(operand_nodes)
            return self._resolve(leaf, region)

        args = fx.node.map_arg(call.node.args, local)
        kwargs = fx.node.map_arg(call.node.kwargs, local)
        self.emitter.describe(call, inputs, outputs)
        result = rule.emit(self.emitter, call, args, kwargs, outputs)
        return self._results(call, result, outputs)

    def _results(self, call: Call, result: Any, outputs: list[Layout]) -> Any:
        """Pair the local results with the layouts; nested lists keep their structure."""
        remaining = iter(outputs)

        def build(fake: Any, local: Any, name: str) -> Any:
            if isinstance(fake, Tensor):
                layout = next(remaining)
                local.meta |= {"layout": layout, "global": name}
                return Value(tuple(fake.shape), fake.dtype, {layout: local}, name)
            if isinstance(fake, (list, tuple)):
                items = []
                for position, item in enumerate(fake):
                    if item is None:
                        next(remaining)
                        items.append(None)
                        continue
                    if isinstance(local, (list, tuple)):
                        picked = local[position]
                    else:
                        picked = self.emitter.call(_getitem, (local, position), {})
                    items.append(build(item, picked, f"{name}#{position}"))
                return items
            return local

        return build(call.node.meta.get("val"), result, call.node.name)


_WHOLE = Whole()
_getitem = operator.getitem


def _growth(candidate: Candidate, values: list[Value], forms: Any, outputs: Any) -> int:
    """Return by how many bytes a partial result exceeds the partial operands it comes from.

    It has to be reduced sooner or later; reduced before it grew it costs less. An operand that
    is whole and only counted as a partial one (a bias) needs no reduction.
    """
    before = sum(
        v.bytes
        for v, p, have in zip(values, candidate.inputs, forms, strict=True)
        if isinstance(p, Partial) and p in have
    )
    after = sum(
        o.numel() * o.dtype.itemsize
        for o, p in zip(outputs, candidate.outputs, strict=True)
        if isinstance(p, Partial) and o is not None
    )
    return max(0, after - before) if before else 0


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor inputs in the order in which map_arg meets them."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) if _is_tensor(n) else None)
    return found


def _outputs(fake: Any) -> tuple[Tensor | None, ...]:
    """Return the tensor outputs, nested lists flattened, None where there is none."""
    if isinstance(fake, (list, tuple)):
        return tuple(leaf for item in fake for leaf in _outputs(item))
    return (fake if isinstance(fake, Tensor) else None,)


def layout_shapes(shape: tuple[int, ...], layout: Layout, mesh: MeshShape) -> list[tuple[int, ...]]:
    """Return the local shape on every rank, in rank order."""
    return [local_shape(shape, layout, c) for c in mesh.coordinates()]
