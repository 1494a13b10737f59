"""A case file of plain transformers beside a script: what an `hf:` address means, written out.

The model is its configuration; the batch was drawn by this project, so its tensors are saved.
"""

from __future__ import annotations

import ast
import os
import pprint
from pathlib import Path
from typing import Any, Final

import torch

from spmd_verify.cases.case import LoadedCase
from spmd_verify.hf.cases import Built, built
from spmd_verify.repros.case import refusal
from spmd_verify.whole_file import write_whole

_FILE: Final = '''\
"""{address} as spmd-verify builds it: small, with random weights. Needs transformers {version}."""

from pathlib import Path

import torch
import transformers

transformers.logging.set_verbosity_error()
CONFIG = {config}


def get_model():
    config = transformers.AutoConfig.for_model({model_type!r}, **CONFIG)
    return transformers.{auto}.from_config(config, experts_implementation={experts!r}).train()


def get_inputs():
    return torch.load(Path(__file__).with_suffix(".pt"))  # the global batch
'''


def write_case(case: LoadedCase, script: Path) -> list[Path]:
    """Write `SCRIPT_case.py` and its tensors beside a script; return both.

    Raises:
        Unsupported: `no-repro`: a configuration that is not made of plain values.
    """
    text = _text(case.address, built(case.address.removeprefix("hf:"), {}))
    target = script.with_name(f"{script.stem}_case.py")
    tensors = target.with_suffix(".pt")
    _write_tensors(case.batch(0), tensors)
    write_whole(str(target), text.encode())
    return [target, tensors]


def _text(address: str, made: Built) -> str:
    """Return the file."""
    config = pprint.pformat(made.fields, width=96, sort_dicts=False)
    try:
        is_plain = ast.literal_eval(config) == made.fields
    except (ValueError, SyntaxError):
        is_plain = False
    if not is_plain:
        raise refusal(
            f"the case {address}",
            "Its configuration holds values that are no plain Python",
            "Write it to a model file with get_inputs() and a class or get_model()",
        )
    return _FILE.format(
        address=address, version=made.version, config=config, auto=made.auto,
        model_type=made.model_type, experts=made.experts,
    )  # fmt: skip


def _write_tensors(batch: Any, path: Path) -> None:
    """Write the global batch, whole or not at all."""
    waiting = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(batch, waiting)
        waiting.replace(path)
    finally:
        waiting.unlink(missing_ok=True)
