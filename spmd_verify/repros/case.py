"""The lines of a reproducing script that build a case's model, batches, optimizer and step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import torch

from spmd_verify.cases.address import Address
from spmd_verify.cases.case import PROBE_LEARNING_RATE, LoadedCase
from spmd_verify.cases.default_loss import own_loss
from spmd_verify.cases.discovery import discover
from spmd_verify.cases.training_step import forward
from spmd_verify.errors import Unsupported

# What `default_loss` does for outputs that are tensors, tuples or dicts of them.
PROJECTED: Final = """\
def projected(output, batch):  # the case has no loss: means of the outputs times fixed numbers
    total = 0.0
    for index, leaf in enumerate(x for x in pytree.tree_leaves(output) if x.is_floating_point()):
        over = next((dim for dim, size in enumerate(leaf.shape) if size == batch), None)
        shape = [1 if dim == over else size for dim, size in enumerate(leaf.shape)]
        draw = random.Random(1_000_003 * index + 17).randrange
        numbers = [(2 * draw(32) - 31) / 32 for _ in range(torch.Size(shape).numel())]
        total = total + (leaf * leaf.new_tensor(numbers).reshape(shape)).mean()
    return total


"""


# As `training_step.micro_batches`: micro-step i of N takes samples i, i + N, ...
_MICRO_STEPS: Final = """\
whole, spec = pytree.tree_flatten(batch)
total, pairs = 0.0, list(zip(whole, {dims}))  # with the batch dim of each
for index in range({count}):
    cut = [x if d is None else x.movedim(d, 0)[index::{count}].movedim(0, d) for x, d in pairs]
    batch, waits = pytree.tree_unflatten(cut, spec), index < {count} - 1
    getattr(model, "set_requires_gradient_sync", bool)(not waits)  # fully_shard
    with getattr(model, "no_sync" if waits else "", contextlib.nullcontext)():  # DDP
        loss = {loss} * (cut[{leaf}].shape[{dim}] / whole[{leaf}].shape[{dim}])
        loss.backward()
    total = total + loss.detach()
"""


def refusal(what: str, why: str, remedy: str) -> Unsupported:
    """Return the error of what no script of plain torch says."""
    return Unsupported(f"No script reproduces this: {what}. {why}. {remedy}", slug="no-repro")


class CaseText:
    """What a script says of one case.

    Attributes:
        case: Loaded in this process.
        module: The user's, in which hooks are found by name.
        steps: How many are run.
        is_probe: Trained with plain SGD.
        is_projected: The loss is the checker's projection; known once `step` was asked.
    """

    def __init__(
        self, case: LoadedCase, module: ModuleType, address: Address, steps: int, is_probe: bool
    ) -> None:
        """Build the model once, to see what it is.

        Raises:
            Unsupported: `no-repro`: what a forward converts, leaves that require gradients.
        """
        self.case = case
        self.module = module
        self.address = address
        self.steps = steps
        self.is_probe = is_probe
        self.is_projected = False
        self.built = case.build_model()
        odd = [
            name
            for name, value in self.built.named_parameters()
            if value.is_floating_point() and value.dtype != case.dtype
        ]
        if odd:
            raise refusal(
                f"{odd[0]} keeps its own dtype", "A forward converts it", "Use --dtype float32"
            )

    @property
    def dtype(self) -> str:
        """Return the dtype where it is not torch's default; empty otherwise."""
        name = str(self.case.dtype)
        return "" if self.case.dtype == torch.get_default_dtype() else name

    def model(self) -> str:
        """Return the expression that builds the model of `case`."""
        hook, given = discover(self.module, self.address).model, self.case.hooks.init_inputs
        names = [name for name, value in vars(self.module).items() if value is hook]
        name = self.address.attribute or ("get_model" if "get_model" in names else names[0])
        value = given() if callable(given) else given
        call = "case.get_init_inputs()"
        if value is None or (isinstance(value, (list, tuple)) and not value):
            arguments = ""
        elif isinstance(value, Mapping):
            arguments = f"**{call}"
        elif not isinstance(value, (list, tuple)):
            arguments = call
        elif len(value) == 2 and isinstance(value[0], (list, tuple)) and isinstance(value[1], dict):
            arguments = f"*{call}[0], **{call}[1]"
        else:
            arguments = f"*{call}"
        cast = f".to({self.dtype})" if self.dtype else ""
        return f"case.{name}({arguments}){cast}"

    def batches(self) -> str:
        """Return the lines that make `data`, the global batches of all steps."""
        hooks = self.case.hooks
        before, body = ["data = []"], []
        calls: dict[str, str] = {}
        for name, hook in (("inputs", hooks.inputs), ("targets", hooks.targets)):
            if hook is None:
                continue
            taken = inspect.signature(hook).parameters
            asked = {"step": "step=step", "seed": "seed=SEED"}
            words = ", ".join(text for key, text in asked.items() if key in taken)
            call = f"case.get_{name}({words})"
            if inspect.isgeneratorfunction(hook):
                before.append(f"{name}_stream = {call.replace('step=step', 'step=0')}")
                call = f"next({name}_stream)"
            elif "step" not in taken and self.steps > 1:
                call = f"{call} if step == 0 else {name}"
            elif self.case.form.inputs != "call":
                calls[name] = call
            body.append(f"{name} = {call}")
        if len(calls) == len(body):
            joined = re.sub('inputs|targets(?!")', lambda name: calls[name[0]], self._joined())
            return f"data = [{joined} for step in range(STEP + 1)]\n"
        body.append(f"data.append({self._joined()})")
        loop = ["for step in range(STEP + 1):", *(f"    {line}" for line in body)]
        return "".join(f"{line}\n" for line in [*before, *loop])

    def _joined(self) -> str:
        """Return the expression that joins inputs and targets to what a step gets."""
        form, inputs = self.case.form, self.case.inputs(0)
        if form.inputs == "dict":
            targets = {"none": "", "merged": ", **targets"}.get(
                form.targets, ', "targets": targets'
            )
            return f"{{**inputs{targets}}}"
        one = "*inputs" if isinstance(inputs, (list, tuple)) else "inputs"
        head = "*inputs[0], inputs[1]" if form.inputs == "call" else one
        tail = {"none": "", "one": ", targets"}.get(form.targets, ", *targets")
        return f"({head}{tail or ','})"

    def optimizer(self) -> str:
        """Return the expression that builds the optimizer of `model`."""
        if self.is_probe:
            return f"torch.optim.SGD(list(model.parameters()), lr={PROBE_LEARNING_RATE})"
        hook = self.case.hooks.optimizer
        if hook is None:
            return "torch.optim.AdamW(list(model.parameters()), lr=1e-3)"
        takes_model = next(iter(inspect.signature(hook).parameters), "") == "model"
        return f"case.get_optimizer({'model' if takes_model else 'list(model.parameters())'})"

    @property
    def num_optimizers(self) -> int:
        """Return how many optimizers the case has; 0 for one that is in no list."""
        made = self.case.optimizer(self.built)
        return len(made) if isinstance(made, list) else 0

    def step(self) -> str:
        """Return the lines of the case's own step, or of the default one."""
        if self.case.hooks.step is not None:
            return "return case.step(model, optimizer, batch)"
        is_list = self.num_optimizers > 0
        each = "for each in optimizer:\n    each" if is_list else "optimizer"
        loss = re.sub(r"\boutput\b", f"model({self._arguments()})", self._loss())
        micro_steps, norm = self.case.variants.accumulate, self.case.variants.clip
        if micro_steps > 1:
            leaf = next(at for at, dim in enumerate(self.case.batch_dims) if dim is not None)
            once = _MICRO_STEPS.format(
                count=micro_steps, loss=loss, dims=self.case.batch_dims, leaf=leaf,
                dim=self.case.batch_dims[leaf],
            )  # fmt: skip
        else:
            once = f"loss = {loss}\nloss.backward()\n"
        clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm})\n" if norm else ""
        result = "total" if micro_steps > 1 else "loss.detach()"
        return f"{each}.zero_grad()\n{once}{clip}{each}.step()\nreturn {result}"

    def _arguments(self) -> str:
        """Return the arguments of forward, from `batch`."""
        form = self.case.form
        if form.inputs == "dict":
            args, kwargs, _ = self.case.split(self.case.batch(0))
            assert not args, "a dict of inputs is given by name"
            if form.targets == "none":
                return "**batch"
            return f"**{{name: batch[name] for name in {tuple(kwargs)!r}}}"
        count = form.num_inputs - (form.inputs == "call")
        is_all = form.targets == "none" and form.inputs != "call"
        given = "*batch" if is_all else f"*batch[:{count}]"
        return f"{given}, **batch[{count}]" if form.inputs == "call" else given

    def _targets(self) -> str:
        """Return the targets, from `batch`."""
        form = self.case.form
        if form.inputs == "dict":
            if form.targets == "one":
                return 'batch["targets"]'
            return f"{{name: batch[name] for name in {form.target_keys!r}}}"
        at = form.num_inputs
        return f"batch[{at}]" if form.targets == "one" else f"tuple(batch[{at}:])"

    def _loss(self) -> str:
        """Return the loss, from `output` and `batch`."""
        if self.case.hooks.loss is not None:
            none = self.case.form.targets == "none"
            return "case.loss(output)" if none else f"case.loss(output, {self._targets()})"
        output = self._output()
        ready = own_loss(output)
        if ready is None:
            self.is_projected = True
            if not self._is_plain(output):
                raise refusal(
                    "the case has no loss",
                    f"The checker's own, a fixed projection, is written out for tensors, tuples "
                    f"and dicts of them, and forward returns {type(output).__name__}",
                    "Give the file loss(output, targets)",
                )
            at = next(i for i, dim in enumerate(self.case.batch_dims) if dim is not None)
            size = f"pytree.tree_leaves(batch)[{at}].shape[{self.case.batch_dims[at]}]"
            return f"projected(output, {size})"
        if output is ready:
            return "output"
        if isinstance(output, Mapping):
            return f"output[{next(key for key, value in output.items() if value is ready)!r}]"
        if isinstance(output, (list, tuple)) and not hasattr(output, "loss"):
            return f"output[{next(i for i, value in enumerate(output) if value is ready)}]"
        return "output.loss"

    def _is_plain(self, output: Any) -> bool:
        """Say whether pytree finds the tensors of an output, and no complex one is among them."""
        leaves = torch.utils._pytree.tree_leaves(output)
        return all(isinstance(each, torch.Tensor) and not each.is_complex() for each in leaves)

    def _output(self) -> Any:
        """Return what forward gives on one device."""
        args, kwargs, _ = self.case.split(self.case.batch(0))
        with self.case.factory_mode():
            return forward(self.case, self.built, args, kwargs)

    def split(self, axes: tuple[str, ...], style: str) -> list[tuple[int | None, ...] | None]:
        """Return, per leaf of a batch, the dim that each axis divides; None for no tensor."""
        leaves = torch.utils._pytree.tree_leaves(self.case.batch(0))
        sharding = self.case.sharding(axes, style)
        found: list[tuple[int | None, ...] | None] = []
        for path, leaf in zip(self.case.leaf_paths, leaves, strict=True):
            is_tensor = isinstance(leaf, torch.Tensor)
            dims = sharding.get(path, {})
            found.append(tuple(dims.get(axis) for axis in axes) if is_tensor else None)
        return found

    def copied(self) -> str:
        """Return the expression that copies a rank's part of one tensor of the batch."""
        leaves = torch.utils._pytree.tree_leaves(self.case.batch(0))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(leaf.requires_grad for leaf in tensors):
            raise refusal(
                "an input requires a gradient", "A copy of it is none", "Make it a parameter"
            )
        text = "part(leaf, dims, at).detach().clone()"
        if self.dtype and any(leaf.is_floating_point() for leaf in tensors):
            text = f"({text}.to({self.dtype}) if leaf.is_floating_point() else {text})"
        return text if len(tensors) == len(leaves) else f"leaf if dims is None else {text}"

    def owner(self, name: str) -> tuple[str, str]:
        """Return the module path and the last name of a parameter or buffer."""
        path, _, last = name.rpartition(".")
        return path, last

    def module_path(self, name: str) -> tuple[str, str]:
        """Return the module that an output is named after, and the path inside the output."""
        known = {path: module for path, module in self.built.named_modules() if path}
        found = [
            path for path in known if name == path or name.startswith((f"{path}[", f"{path}."))
        ]
        path = max(found, key=len, default="")
        return path, name[len(path or "model") :]
