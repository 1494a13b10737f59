"""Verbs and flags of the command line. Torch-free: `--help` imports this and no more."""

import argparse
from collections.abc import Sequence
from typing import Any, Final

from spmd_verify.errors import UsageError
from spmd_verify.options import FuzzOptions
from spmd_verify.variants import DEFAULT_BACKEND, KEYS
from spmd_verify.version import __version__

VERBS: Final = (
    "run", "certify", "compare", "baseline", "fuzz", "report", "repro", "doctor", "styles",
    "schema", "init", "config",
)  # fmt: skip
VARIANT_FLAGS: Final = (*(key.replace("_", "-") for key in sorted(KEYS)), "resume-check")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `spmd-verify model.py` is `spmd-verify run model.py`.

    Raises:
        SystemExit: from argparse, with code 2 or 0.
    """
    words = list(argv)
    if words and words[0] not in (*VERBS, "-h", "--help", "--version"):
        words.insert(0, "run")
    return _parser().parse_args(words)


def _parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="spmd-verify",
        description="Check that a training step computes on a mesh what one device computes.",
        epilog="spmd-verify model.py is spmd-verify run model.py.",
    )
    parser.add_argument("--version", action="version", version=f"spmd-verify {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run = verbs.add_parser("run", help="the check")
    _add_run_flags(run)
    _add_earlier_flags(run)
    certify = verbs.add_parser("certify", help="plant faults in the parallel run: what would a "
        "green table have caught?")  # fmt: skip
    _add_run_flags(certify)
    certify.add_argument("--faults", type=int, metavar="N", help="most faults planted in a cell "
        "(default: 24)")  # fmt: skip
    _add_compare_flags(verbs.add_parser("compare", help="two dumps, or two records"))
    _add_baseline_flags(verbs.add_parser("baseline", help="keep the state of cells, see what got "
        "worse"))  # fmt: skip
    _add_fuzz_flags(verbs.add_parser("fuzz", help="drawn models against the engine"))
    _add_report_flags(verbs.add_parser("report", help="show a record again, in any format"))
    _add_repro_flags(verbs.add_parser("repro", help="one mismatch as a script of plain torch"))
    verbs.add_parser("doctor", help="what of this machine will not work, and why")
    verbs.add_parser("styles", help="list the parallel styles")
    verbs.add_parser("schema", help="print the JSON Schema of a record")
    _add_init_flags(verbs.add_parser("init", help="print a CI job"))
    config = verbs.add_parser("config", help="every setting and where it comes from")
    config.add_argument("action", choices=["show"])
    _add_run_flags(config, targets="*")
    _add_earlier_flags(config)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser, targets: str = "+") -> None:
    """Declare the flags of `run`; None means not given, so that configuration may decide."""
    add = parser.add_argument
    add("targets", nargs=targets, metavar="TARGET", help="model.py, model.py:Net, model.py::case, "
        "package.module:make_model, a directory, hf:TYPE")  # fmt: skip
    what = parser.add_argument_group("what to run")
    add = what.add_argument
    add("--styles", action="append", metavar="IDS", help="ids, globs, groups engine, torch, user, "
        "all; commas or repeated (default: engine and the file's own)")  # fmt: skip
    add("--mesh", help="4, 2x2, dp=4 or dp=2,tp=2 (default: 2 ranks)")
    add("--mesh-sweep", action="append", default=[], metavar="MESHES", help="several meshes, 2,4 "
        "or dp=2,tp=2, and the smallest condition under which cells fail; repeatable")  # fmt: skip
    add("--dtype", help="float32, float64 or bfloat16 (default: float32)")
    add("--exact", action="store_true", default=None, help="single steps from few-bit values, "
        "judged bit for bit")  # fmt: skip
    add("--steps", type=int, help="training steps (default: 3)")
    add("--seed", type=int, help="base seed (default: 0)")
    add("--adversarial", action="store_true", help="inputs and initial values that hide little: "
        "see docs/adversarial.md")  # fmt: skip
    add("-k", dest="match", metavar="GLOB", help="only cells CASE/STYLE that match")
    add("-x", dest="stop_at_first", action="store_true", help="stop after the first failing cell")
    _add_variant_flags(parser)
    how = parser.add_argument_group("how to run it")
    add = how.add_argument
    add("--runner", help="processes or lockstep (default: processes)")
    add("--pp-schedule", metavar="ORDER", help="of micro-batches in pipeline stages: gpipe or 1f1b "
        "(default: gpipe)")  # fmt: skip
    add("--timeout", type=float, metavar="SECONDS", help="per cell (default: 300)")
    add("--probe", action=argparse.BooleanOptionalAction, help="judge a plain SGD step beside the "
        "case's optimizer (default: not for engine styles)")  # fmt: skip
    add("--max-ranks", type=int, help="largest mesh (default: 16 for processes, 4096 for lockstep)")
    add("--log-dir", metavar="DIR", help="where rank logs go (default: a temporary folder)")
    add("--no-cache", action="store_true", default=None, help="neither use nor keep references "
        "of other runs")  # fmt: skip
    add("--budget", type=float, metavar="SECONDS", help="begin no further cell after that time")
    shown = parser.add_argument_group("what to show")
    add = shown.add_argument
    add(
        "--list",
        "--dry-run",
        dest="list_only",
        action="store_true",
        help="list the cells, run nothing",
    )
    add("--explain", action="store_true", help="say where each part of the case was found")
    code = _add_common_flags(parser, shown)
    code.add_argument("--fail-on", metavar="VERDICTS", help="which fail a cell, commas (default: "
        "mismatch,not_exercised,semantic); error always does")  # fmt: skip


def _add_earlier_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `run` that name what earlier runs found."""
    add = parser.add_argument_group("earlier runs").add_argument
    add("--baseline", metavar="FILE", help="compare with a baseline; a regression fails, a known "
        "failure does not")  # fmt: skip
    add("--resume", metavar="RECORD", help="run only the cells that an earlier record lacks, or "
        "has as errors")  # fmt: skip


def _add_variant_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the switches that change how any style trains any case."""
    add = parser.add_argument_group("variants, on any style (docs/variants.md)").add_argument
    add("--accumulate", type=int, metavar="N", help="micro-steps per step, gradients summed")
    add("--clip", type=float, metavar="NORM", help="clip gradients to a norm")
    add("--autocast", metavar="DTYPE", help="bfloat16 or float16 in forward and loss")
    add("--param-dtype", metavar="DTYPE", help="of fully_shard's mixed precision (fsdp2, hsdp)")
    add("--reduce-dtype", metavar="DTYPE", help="likewise, of its gradient reduction")
    add("--checkpoint-activations", action="store_true", default=None, help="recompute repeated "
        "blocks in backward")  # fmt: skip
    add("--torch-compile", nargs="?", const=DEFAULT_BACKEND, metavar="BACKEND", help="compile the "
        f"wrapped model (default backend: {DEFAULT_BACKEND})")  # fmt: skip
    add("--train-eval-train", action="store_true", default=None, help="an eval forward between "
        "steps, compared")  # fmt: skip
    add("--resume-check", action="store_true", default=None, help="save before the last step, load "
        "into a fresh build and another mesh size, continue")  # fmt: skip


def _add_compare_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `compare`."""
    add = parser.add_argument
    add("reference", metavar="A", help="what is right: a dump of one device or more, or a record")
    add("candidate", metavar="B", help="what is judged: a dump, or a newer record")
    what = parser.add_argument_group("what to judge by (dumps)")
    add = what.add_argument
    add("--exact", metavar="DUMP", help="A's run in float64")
    add("--noise", action="append", default=[], metavar="DUMP", help="another run of A, such as "
        "another order of the batch; repeatable, four are wanted")  # fmt: skip
    add("--layout", metavar="FILE", help="JSON {name glob: placements} for tensors without layout")
    add(
        "--axes", metavar="MESH", help="dp=2 or dp=2,tp=2: the mesh of plain rank0.safetensors, ..."
    )
    _add_common_flags(parser, parser.add_argument_group("what to show"))


def _add_common_flags(
    parser: argparse.ArgumentParser, shown: argparse._ArgumentGroup
) -> argparse._ArgumentGroup:
    """Declare the flags of every verb that judges; return the group about the exit code."""
    add = shown.add_argument
    add("-v", "--verbose", action="count", default=0, help="list tensors; -vv also exact ones; "
        "tracebacks of errors")  # fmt: skip
    add("-q", "--quiet", action="store_true", help="no progress, only the table")
    _add_report_flag(shown)
    add("--format", default="text", metavar="FORMAT", help="of stdout: text, json or github "
        "(default: text)")  # fmt: skip
    _add_color_flag(shown)
    code = parser.add_argument_group("exit code")
    add = code.add_argument
    add("--strict", action="store_true", default=None, help="undetermined and unexercised rows "
        "fail too")  # fmt: skip
    add("--exit-zero", action="store_true", help="exit 0 instead of 1")
    return code


def _add_baseline_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `baseline`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        found = actions.add_parser(name, help=text, description=text)
        if name not in ("list", "history"):
            found.add_argument("record", metavar="RECORD", help="what --report json=PATH wrote")
        found.add_argument("file", metavar="FILE", help="of JSON lines" if name == "history" else
            "the baseline")  # fmt: skip
        return found

    action("save", "add a run's cells to a baseline; what it has is not changed")
    compare = action("compare", "say what got worse or better; exit 1 for a regression")
    compare.add_argument("--strict", action="store_true", help="every change fails that is not for "
        "the better")  # fmt: skip
    compare.add_argument("--exit-zero", action="store_true", help="exit 0 instead of 1")
    compare.add_argument("--environment", metavar="NAME", help="compare with the cells of another "
        "torch, backend or instruction set")  # fmt: skip
    accept = action("accept", "show the difference and make the run's cells the baseline's")
    accept.add_argument("--yes", action="store_true", help="also where CI is set")
    accept.add_argument("-k", dest="match", metavar="GLOB", help="only cells that match")
    accept.add_argument("--reason", help="failing cells become known failures, for this reason")
    accept.add_argument("--until", metavar="DATE", help="last day of that, 2027-01-31")
    action("list", "print what a baseline holds")
    history = action("history", "append runs to a history, one JSON line each, and print it")
    history.add_argument("records", nargs="*", metavar="RECORD")
    history.add_argument("--page", metavar="PATH", help="write the trend to PATH.md or PATH.html")


def _add_init_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `init`."""
    add = parser.add_argument
    add("service", choices=["github", "gitlab"])
    add("targets", nargs="*", metavar="TARGET", help="as of run (default: the current folder)")
    add("--mesh", help="as of run")
    add("--styles", metavar="IDS", help="as of run")
    add("--baseline", metavar="FILE", help="as of run")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `report`."""
    parser.description = "Show a record again. Without --report the text report is printed."
    add = parser.add_argument
    add("record", metavar="RECORD", help="what --report json=PATH wrote")
    _add_report_flag(parser)
    add("--format", metavar="FORMAT", help="print it too: text, json or github")
    add("-v", "--verbose", action="count", default=0, help="list tensors; -vv also exact ones")
    add("--explain", action="store_true", help="say where each part of the case was found")
    _add_color_flag(parser)


def _add_report_flag(shown: argparse._ActionsContainer) -> None:
    """Declare `--report`."""
    shown.add_argument("--report", action="append", default=[], metavar="FORMAT=PATH", help="write "
        "json, junit and others, see docs/reports.md; - is stdout; repeatable")  # fmt: skip


def _add_color_flag(shown: argparse._ActionsContainer) -> None:
    """Declare `--color`."""
    shown.add_argument("--color", default="auto", metavar="WHEN", help="auto, always or never")


def _add_fuzz_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `fuzz`."""
    parser.description = (
        "Draw models and training steps, judge each under the engine's styles in this process, "
        "and write the shortest form of every one that fails."
    )
    given = FuzzOptions()
    add = parser.add_argument
    add("--seconds", type=float, default=given.seconds, metavar="N", help="how long to draw "
        "(default: 60)")  # fmt: skip
    add("--seed", type=int, default=given.seed, help="of the draws (default: 0)")
    add("--max-ranks", type=int, default=given.max_ranks, help="largest mesh (default: 8)")
    add("--output", default=given.output, metavar="DIR", help="where failing models go (default: "
        "the current folder)")  # fmt: skip
    add("--dtype", default=given.dtype, help="float64 or float32 (default: float64)")


def _add_repro_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `repro`."""
    parser.description = (
        "Write a script that runs one cell of a record with torch and gloo alone and prints the "
        "tensor that differs first."
    )
    add = parser.add_argument
    add("record", metavar="RECORD", help="what --report json=RECORD wrote")
    add("cell", metavar="CELL", help="a style, CASE/STYLE, or STYLE@MESH where it has several")
    add("--output", metavar="FILE", help="the script (default: repro_CASE_STYLE.py here); the case "
        "file is copied beside it")  # fmt: skip


def report_argument(text: str) -> tuple[str, str]:
    """Split `FORMAT=PATH`.

    Raises:
        UsageError: `bad-report`.
    """
    report_format, equals, path = text.partition("=")
    if not equals or not path:
        raise UsageError(
            f"Cannot read the report: --report {text!r}. Write FORMAT=PATH, for example "
            f"json=record.json",
            slug="bad-report",
        )
    return report_format, path


def flag_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, by configuration key."""
    given = {
        "styles": _split(arguments.styles),
        "mesh": arguments.mesh,
        "dtype": arguments.dtype,
        "exact": arguments.exact,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "timeout": arguments.timeout,
        "runner": arguments.runner,
        "max-ranks": arguments.max_ranks,
        "log-dir": arguments.log_dir,
        "no-cache": arguments.no_cache,
        "strict": arguments.strict,
        "fail-on": None if arguments.fail_on is None else _split([arguments.fail_on]),
        "baseline": getattr(arguments, "baseline", None),
        "budget": arguments.budget,
        "probe": arguments.probe,
        "pp-schedule": arguments.pp_schedule,
        **{key: getattr(arguments, key.replace("-", "_")) for key in VARIANT_FLAGS},
        "faults": getattr(arguments, "faults", None),
    }
    return {key: value for key, value in given.items() if value is not None}


def _split(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Join repeated `--styles` and split them at commas."""
    if values is None:
        return None
    words = [word.strip() for value in values for word in value.split(",")]
    return tuple(word for word in words if word)
