"""The messages about a case that cannot be judged, in one place. Torch-free.

Each function returns the error; the caller raises it. Those about the single-device run
are raised by the judge, the others while the case is loaded.
"""

from collections.abc import Sequence

from spmd_verify.errors import CaseError, ReferenceRunError


def no_inputs(where: str, parameters: Sequence[str]) -> CaseError:
    """Nothing says what the model is fed."""
    takes = ", ".join(parameters) if parameters else "nothing"
    listed = ", ".join(f"torch.randn(8, ...) for {name}" for name in parameters[:2])
    return CaseError(
        f"No get_inputs: {where}. forward takes ({takes}). Add a function get_inputs() that "
        f"returns the global batch as a list, for example [{listed}]",
        slug="no-inputs",
    )


def constructor_arguments(where: str, model: str, missing: Sequence[str]) -> CaseError:
    """The model class needs arguments and nobody gives them."""
    return CaseError(
        f"The constructor of {model} needs arguments: {where}. Missing {', '.join(missing)}. "
        f"Add get_init_inputs() that returns them as a list or a dict, or get_model()",
        slug="missing-constructor-arguments",
    )


def not_a_module(where: str, kind: str) -> CaseError:
    """What should have built a model returned something else."""
    return CaseError(
        f"The model is no torch.nn.Module: {where}. Got {kind}. Return the module itself",
        slug="not-a-module",
    )


def nothing_trainable(where: str) -> CaseError:
    """No parameter requires grad."""
    return CaseError(
        f"No parameter requires grad: {where}. There is no gradient to compare. Leave at least "
        f"one parameter trainable",
        slug="nothing-trainable",
    )


def inputs_ended(where: str, hook: str, batches: int) -> CaseError:
    """A generator gave fewer batches than there are steps."""
    return CaseError(
        f"{hook} ended too early: {where}. Got {batches} batches, one per step is needed. Yield "
        f"more, or pass --steps {max(batches, 1)}",
        slug="inputs-ended",
    )


def bad_optimizer(where: str, kind: str) -> CaseError:
    """`get_optimizer` returned something that is no optimizer."""
    return CaseError(
        f"get_optimizer returned no optimizer: {where}. Got {kind}, expected a "
        f"torch.optim.Optimizer or a list of them. Return the optimizer itself",
        slug="not-an-optimizer",
    )


def refused_optimizer(where: str, kind: str) -> CaseError:
    """An optimizer whose step is outside what a training step promises."""
    why = {
        "LBFGS": "it calls the closure a data-dependent number of times in one step",
        "SparseAdam": "it reads sparse gradients",
    }
    return CaseError(
        f"This optimizer is refused: {where}. Got {kind}: {why[kind]}. Use another, for example "
        f"torch.optim.AdamW",
        slug="optimizer-refused",
    )


def sparse_gradient(where: str, name: str) -> CaseError:
    """A parameter gets a sparse gradient."""
    return CaseError(
        f"Sparse gradients are refused: {where}. {name!r} is set to make them (sparse=True). "
        f"Build it with sparse=False",
        slug="sparse-gradient",
    )


def loss_needs_targets(where: str) -> CaseError:
    """`loss(output, targets)` without `get_targets`."""
    return CaseError(
        f"loss needs targets: {where}. It takes (output, targets) and the file has no "
        f"get_targets. Add get_targets(), or let loss take the output alone",
        slug="loss-needs-targets",
    )


def step_has_own_update(where: str, flag: str) -> CaseError:
    """A variant asks for another update than the one that the case's own step makes."""
    return CaseError(
        f"{flag} does not reach the case's own training step: {where}. Got a step(model, "
        f"optimizer, batch), which does backward and update itself. Do it there, or leave out the "
        f"step and bring a loss instead",
        slug="step-has-own-update",
    )


def too_few_samples(where: str, size: int, count: int) -> CaseError:
    """A batch has fewer samples than there are micro-steps."""
    return CaseError(
        f"The batch has too few samples: {where}. Got {size} for {count} micro-steps of at least "
        f"one sample. Use --accumulate {size}, or a larger batch",
        slug="too-few-samples",
    )


def no_default_loss(where: str, kind: str) -> ReferenceRunError:
    """The output holds nothing a default loss can be made of."""
    return ReferenceRunError(
        f"The output gives no loss: {where}. Got {kind} without a floating tensor in it. Add "
        f"loss(output) that returns a scalar tensor",
        slug="no-default-loss",
    )


def loss_not_scalar(where: str, got: str) -> ReferenceRunError:
    """The loss is no single number."""
    return ReferenceRunError(
        f"The loss is not a scalar tensor: {where}. Got {got}. Reduce it, for example with .mean()",
        slug="loss-not-scalar",
    )


def loss_without_gradient(where: str) -> ReferenceRunError:
    """The loss does not depend on a parameter."""
    return ReferenceRunError(
        f"The loss has no gradient: {where}. It does not depend on any parameter that requires "
        f"grad. Return it before .detach() or .item(), and compute it with grad mode on",
        slug="loss-without-gradient",
    )


def not_finite(where: str, name: str, value: str, step: int) -> ReferenceRunError:
    """The loss or a gradient of the reference is NaN or inf.

    Args:
        where: The case's address.
        name: `loss`, or the parameter whose gradient it is.
        value: What was found, such as "nan".
        step: Training step, from 0.
    """
    what = "loss" if name == "loss" else f"gradient of {name!r}"
    return ReferenceRunError(
        f"The reference is not finite: {where}. The {what} is {value} in step {step} on one "
        f"device, before any parallel style. Lower the learning rate or correct the inputs",
        slug="reference-not-finite",
    )


def not_deterministic(where: str, stage: str, name: str, step: int) -> ReferenceRunError:
    """Two single-device runs from the same seeds differ."""
    return ReferenceRunError(
        f"The model is not deterministic on one device: {where}. Two runs from the same seeds "
        f"differ first in step {step}, stage {stage}, tensor {name!r}. Look for state outside "
        f"the module, a clock, a set's order or a generator of its own",
        slug="not-deterministic",
    )


def changing_batches(where: str, step: int) -> CaseError:
    """The shape of a batch changes from step to step in a way we cannot follow."""
    return CaseError(
        f"The batch changes its structure: {where}. Step {step} has other arguments than step "
        f"0. Return the same arguments every step; their sizes may differ",
        slug="changing-batches",
    )
