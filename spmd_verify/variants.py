"""Variants: switches that change how any case is trained, and travel as its overrides. Torch-free.

What each means is in docs/variants.md; what a step does about it in `training_step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from spmd_verify.errors import UsageError, choices_text

# Dtypes that autocast and FSDP2's policy may lower float32 to.
LOW_DTYPES: Final[tuple[str, ...]] = ("bfloat16", "float16")
REDUCE_DTYPES: Final[tuple[str, ...]] = ("float32", *LOW_DTYPES)
DEFAULT_BACKEND: Final = "inductor"


@dataclass(frozen=True)
class Variants:
    """How a case is trained besides what its file says; fields in the order of the flags.

    Attributes:
        accumulate: Micro-steps per step.
        clip: Largest norm of the gradients; 0 for no clipping.
        autocast: Dtype of autocast around forward and loss; empty for none.
        param_dtype: Dtype that FSDP2 casts parameters and inputs to; empty for none.
        reduce_dtype: Dtype that FSDP2 reduces gradients in; empty for `param_dtype`.
        checkpoint_activations: Whether styles recompute the repeated blocks in backward.
        torch_compile: Backend of `torch.compile` under styles; empty for none.
        train_eval_train: Whether an eval forward follows every step and is compared.
    """

    accumulate: int = 1
    clip: float = 0.0
    autocast: str = ""
    param_dtype: str = ""
    reduce_dtype: str = ""
    checkpoint_activations: bool = False
    torch_compile: str = ""
    train_eval_train: bool = False

    @classmethod
    def of(cls, overrides: Mapping[str, str]) -> Variants:
        """Read the variants among a case's overrides."""
        given: dict[str, Any] = {}
        for entry in fields(cls):
            if entry.name in overrides:
                text = overrides[entry.name]
                kind: Any = type(entry.default)
                given[entry.name] = text == "yes" if kind is bool else kind(text)
        return cls(**given)

    def overrides(self) -> dict[str, str]:
        """Return the variants that are on, as overrides of a case."""
        return {
            entry.name: "yes" if value is True else str(value)
            for entry in fields(self)
            if (value := getattr(self, entry.name)) != entry.default
        }

    @property
    def needs_default_step(self) -> str:
        """Return the flag that only the default step can obey; empty where none is on."""
        on = {
            "--accumulate": self.accumulate > 1,
            "--clip": self.clip > 0,
            "--param-dtype": bool(self.param_dtype or self.reduce_dtype),
        }
        return next((flag for flag, is_on in on.items() if is_on), "")

    @property
    def lowers(self) -> str:
        """Return the flag that computes below float32; empty where none is on."""
        if self.autocast:
            return "--autocast"
        return (
            "--param-dtype" if self.param_dtype else "--reduce-dtype" if self.reduce_dtype else ""
        )

    def checked(self, dtype: str) -> Variants:
        """Return self if every value is in range and fits the case's dtype.

        Raises:
            UsageError: `bad-number`, `unknown-dtype`, `nothing-to-lower`, `two-precisions`.
        """
        if self.accumulate < 1:
            raise UsageError(
                f"Number out of range: --accumulate {self.accumulate}. Expected at least 1",
                slug="bad-number",
            )
        if not 0 <= self.clip < math.inf:
            raise UsageError(
                f"Number out of range: --clip {self.clip}. Expected a norm above 0",
                slug="bad-number",
            )
        for flag, value, choices in (
            ("--autocast", self.autocast, LOW_DTYPES),
            ("--param-dtype", self.param_dtype, LOW_DTYPES),
            ("--reduce-dtype", self.reduce_dtype, REDUCE_DTYPES),
        ):
            if value and value not in choices:
                raise UsageError(
                    f"Unknown value: {flag} {value!r}; {choices_text(value, choices)}",
                    slug="unknown-dtype",
                )
        if self.lowers and dtype != "float32":
            raise UsageError(
                f"Nothing to lower: {self.lowers} lowers float32, and the case's dtype is {dtype}. "
                f"Use --dtype float32",
                slug="nothing-to-lower",
            )
        if self.autocast and (self.param_dtype or self.reduce_dtype):
            raise UsageError(
                "Cannot run both: --autocast and FSDP2's --param-dtype or --reduce-dtype. Each "
                "says in which dtype forward computes. Run one after the other",
                slug="two-precisions",
            )
        return self


# Overrides that are variants, and no fields of a model's configuration.
KEYS: Final[frozenset[str]] = frozenset(entry.name for entry in fields(Variants))
