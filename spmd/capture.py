"""Capture a training step - forward, backward, optimizer - as one functional graph.

Stage one traces the eager step with real autograd inside; stage two traces that graph
again through functionalization. One stage cannot do it: functorch refuses `backward()`.
The step's Python runs exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from spmd.conversions import idle_conversions
from spmd.functional import functional_graph
from spmd.guards import ValuedShapeEnv
from spmd.lifting import World, tensor_of
from spmd.overlap import refuse_shared_memory
from spmd.program import Program, Signature
from spmd.python_values import symbolic_functions
from spmd.questions import compiled_as_written
from spmd.recorder import Recorder

__all__ = ["Program", "capture"]


def capture(
    function: Callable[..., Any],
    world: World,
    fetch: Callable[[int], Any],
    shapes: Callable[[int], tuple[int, ...]] | None = None,
) -> Program:
    """Trace `function` on the world's values.

    Args:
        function: The training step.
        world: From `lift`.
        fetch: Position of a lifted value -> a private real copy of its global value.
            Called only when the step needs a number out of a tensor.
        shapes: Position -> global shape, where the value in the world is a local part.

    Returns:
        The program; nothing in the model, the optimizer or the random generators changed,
        except Python values the step itself changed.

    Raises:
        CaptureError: The step's Python control flow depends on tensor values, or an
            operator cannot be traced; names the user's line.
    """
    shape_env = ValuedShapeEnv()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
    fakes = [_fake(fake_mode, v, shapes(i) if shapes else None) for i, v in enumerate(world.values)]
    recorder = Recorder(fake_mode, world, fetch)
    with ExitStack() as stack:
        stack.callback(shape_env.end_questions)
        stack.enter_context(_without_mkldnn())
        stack.enter_context(symbolic_functions())
        stack.enter_context(compiled_as_written())
        stack.enter_context(_generator_kept())
        stack.enter_context(idle_conversions())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        traced = make_fx(
            lambda *inputs: recorder.run(function, list(inputs)),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*fakes)
        signature = Signature(list(world.specs), list(recorder.outputs))
        graph, captured = functional_graph(traced, fakes, signature, fetch)
    refuse_shared_memory(signature, [*world.values, *captured])
    graph.meta["signature"] = signature
    after = recorder.after
    return Program(
        graph,
        world,
        captured,
        recorder.result_spec,
        recorder.result_constants,
        after.state,
        recorder.cleared_gradients,
        [after.places.get(id(tensor)) for tensor in captured],
        after.written,
        after.python,
        after.requires_grad,
    )


@contextmanager
def _generator_kept() -> Iterator[None]:
    """Leave the default generator as it was: drawing is the graph's business."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Keep oneDNN's fused recurrent layers out of the graph; they have no parts to shard.

    `torch.backends.mkldnn.flags` warns about Intel GPUs, hence the private setter.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _fake(mode: FakeTensorMode, value: Any, shape: tuple[int, ...] | None) -> Tensor:
    """Return a leaf fake tensor for a lifted value; floats become 0-dim float64."""
    plain = tensor_of(value)
    if shape is not None:
        with mode:
            fake = torch.empty(shape, dtype=plain.dtype, device=plain.device)
    else:
        fake = mode.from_tensor(plain, static_shapes=True)
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake
