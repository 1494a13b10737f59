"""The command line: parse, run, print, and one exit code.

Only the verbs `run`, `compare`, `fuzz`, `repro` and `doctor` import torch.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_verify.arguments import flag_settings, parse_arguments, report_argument
from spmd_verify.errors import InternalError, SpmdVerifyError
from spmd_verify.exit_codes import INTERNAL, INTERRUPTED, PASSED, WRONG_USE
from spmd_verify.gate import GateRules
from spmd_verify.mesh_spec import parse_mesh, parse_sweep
from spmd_verify.options import FuzzOptions, Options, check_shown
from spmd_verify.streams import printable, wants_color
from spmd_verify.style_ids import ENTRY_POINTS, STYLES, plugins
from spmd_verify.variants import KEYS, Variants

if TYPE_CHECKING:
    from spmd_verify.record import Record


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_verbose = any(word == "--verbose" or word in ("-v", "-vv") for word in words)
    try:
        if not words:
            parse_arguments(["--help"])
        arguments = parse_arguments(words)
        verbs: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
            "run": _run,
            "certify": _certify,
            "compare": _compare,
            "fuzz": _fuzz,
            "report": _report,
            "repro": _repro,
            "doctor": _doctor,
            "styles": _styles,
            "schema": _schema,
            "baseline": _baseline,
            "init": _init,
            "config": _config,
        }
        return verbs[arguments.verb](arguments, words)
    except SystemExit as leave:  # argparse: 0 after --help, 2 after a wrong flag
        return WRONG_USE if not words else int(leave.code or PASSED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SpmdVerifyError as error:
        return _explain_error(error, is_verbose)
    except Exception as error:  # noqa: BLE001 - the one border where nothing may pass
        broken = InternalError(
            f"Internal error: {type(error).__name__}: {error}. This is a fault of spmd-verify. "
            f"Please report it with the command line spmd-verify {' '.join(words)}",
            slug="internal-error",
            detail="".join(traceback.format_exception(error)).rstrip(),
        )
        return _explain_error(broken, is_verbose)


def _explain_error(error: SpmdVerifyError, is_verbose: bool) -> int:
    """Print an error on stderr and return its exit code."""
    print(f"error: {error}", file=sys.stderr)
    if error.detail:
        print(error.detail, file=sys.stderr)
    if is_verbose and error.exit_code != INTERNAL:
        traceback.print_exception(error)
    return error.exit_code


def options_from(arguments: argparse.Namespace, words: Sequence[str]) -> Options:
    """Resolve flags, environment and pyproject.toml to checked options.

    Raises:
        UsageError: where a value is wrong.
    """
    from spmd_verify import config  # not for --help

    found = config.read(Path.cwd())
    given = {key: setting.value for key, setting in found.settings.items()}
    settings: dict[str, Any] = {**given, **flag_settings(arguments)}
    if "mesh" in settings:
        settings["mesh"] = parse_mesh(settings["mesh"])
    renamed = {"timeout": "timeout_seconds"}
    settings = {renamed.get(key, key.replace("-", "_")): value for key, value in settings.items()}
    variants = Variants(**{key: settings.pop(key) for key in KEYS & set(settings)})
    return Options(
        targets=tuple(arguments.targets),
        match=arguments.match,
        stop_at_first=arguments.stop_at_first,
        exit_zero=arguments.exit_zero,
        explain=arguments.explain,
        list_only=arguments.list_only,
        verbosity=-1 if arguments.quiet else arguments.verbose,
        mesh_sweep=tuple(mesh for text in arguments.mesh_sweep for mesh in parse_sweep(text)),
        reports=tuple(report_argument(text) for text in arguments.report),
        output_format=arguments.format,
        color=arguments.color,
        overrides={"inputs": "adversarial"} if arguments.adversarial else {},
        variants=variants,
        gate=GateRules(overrides=found.overrides, waivers=found.waivers),
        resume=getattr(arguments, "resume", None) or "",
        command=("spmd-verify", *words),
        **settings,
    ).checked()


def _run(arguments: argparse.Namespace, words: list[str]) -> int:
    """Judge the targets, print the report, write the others."""
    from spmd_verify.cases.address import expand  # not for --help

    options = options_from(arguments, words)
    addresses = expand(options.targets)
    if options.list_only:
        return _list(addresses, options)
    from spmd_verify import run_gate
    from spmd_verify.progress import Progress
    from spmd_verify.reporters import terminal, write_report
    from spmd_verify.run import verify

    options, baseline = run_gate.prepared(options)
    progress = Progress(quiet=options.verbosity < 0, color=options.color)
    try:
        record = verify(options, progress)
    finally:
        progress.close()
    record.exit_code = run_gate.finish(record, options, baseline)
    text = terminal.render(
        record,
        verbosity=options.verbosity,
        explain=options.explain,
        has_color=wants_color(options.color, sys.stdout),
    )
    _show(record, options.output_format, text)
    for report_format, path in options.reports:
        write_report(record, report_format, path)
    return int(record.exit_code)


def _certify(arguments: argparse.Namespace, words: list[str]) -> int:
    """Judge the targets, plant faults in what passes, print what was caught."""
    from spmd_verify.cases.address import expand  # not for --help

    options = options_from(arguments, words)
    if options.list_only:
        return _list(expand(options.targets), options)
    from spmd_verify.certify import certify
    from spmd_verify.exit_codes import decide_certified
    from spmd_verify.progress import Progress
    from spmd_verify.reporters import certificates, write_report

    progress = Progress(quiet=options.verbosity < 0, color=options.color)
    try:
        record = certify(options, progress)
    finally:
        progress.close()
    record.exit_code = decide_certified(
        record.cells, strict=options.strict, exit_zero=options.exit_zero
    )
    text = certificates.render(record, verbosity=options.verbosity)
    _show(record, options.output_format, text)
    for report_format, path in options.reports:
        write_report(record, report_format, path)
    return int(record.exit_code)


def _compare(arguments: argparse.Namespace, words: list[str]) -> int:
    """Compare two dumps or two records, print what differs, write the reports."""
    from spmd_verify import compare_verb  # not for --help
    from spmd_verify.reporters import write_report

    reports = [report_argument(text) for text in arguments.report]
    check_shown(reports, arguments.format, arguments.color)
    record, text = compare_verb.compare(arguments, ("spmd-verify", *words))
    _show(record, arguments.format, text)
    for report_format, path in reports:
        write_report(record, report_format, path)
    return int(record.exit_code)


def _report(arguments: argparse.Namespace, words: list[str]) -> int:
    """Show a record again."""
    del words
    reports = [report_argument(text) for text in arguments.report]
    check_shown(reports, arguments.format or "text", arguments.color)
    from spmd_verify.report_verb import read_record, rendered  # not for --help
    from spmd_verify.reporters import text, write_content

    record = read_record(arguments.record)
    for path, content in rendered(record, reports):
        write_content(content, path)
    if arguments.format or not reports:
        shown = text.shown(
            record,
            verbosity=arguments.verbose,
            explain=arguments.explain,
            has_color=wants_color(arguments.color, sys.stdout),
        )
        _show(record, arguments.format or "text", shown)
    return PASSED


def _show(record: "Record", output_format: str, text: str) -> None:
    """Print a record as `--format` says; `text` is what it looks like as text."""
    from spmd_verify.record import encode  # not for --help
    from spmd_verify.reporters import github

    if output_format == "json":
        text = encode(record).decode().rstrip("\n")
    elif output_format == "github":
        text = github.stdout(record, text)
    try:
        print(printable(text, sys.stdout), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; the exit code is still the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fuzz(arguments: argparse.Namespace, words: list[str]) -> int:
    """Draw models, judge them, write those that fail."""
    del words
    options = FuzzOptions(
        arguments.seconds,
        arguments.seed,
        arguments.max_ranks,
        arguments.output,
        arguments.dtype,
    ).checked()
    from spmd_verify.drawn.fuzz import Fuzz  # not for --help
    from spmd_verify.progress import Progress

    progress = Progress()
    try:
        return Fuzz(options, lambda text: print(text, flush=True), progress.note).run()
    finally:
        progress.close()


def _repro(arguments: argparse.Namespace, words: list[str]) -> int:
    """Write the script of one cell and say how to run it."""
    del words
    from spmd_verify.repros.repro import write_repro  # torch

    print(write_repro(arguments.record, arguments.cell, arguments.output), flush=True)
    return PASSED


def _doctor(arguments: argparse.Namespace, words: list[str]) -> int:
    """Say what of this machine will not work."""
    del arguments, words
    from spmd_verify.doctor import examine  # not for --help

    text, code = examine()
    print(text, flush=True)
    return code


def _list(addresses: Sequence[str], options: Options) -> int:
    """Print the cells that would run, one a line."""
    from spmd_verify.cases.case import load_case  # imports torch
    from spmd_verify.style_ids import select

    for address in addresses:
        case = load_case(address, dtype=options.dtype, seed=options.seed, steps=options.steps)
        if options.explain:
            for hook, found in case.discovered.items():
                print(f"# {address}: {hook}: {found}")
        for style in select(options.styles, case.user_styles):
            cell = f"{address}/{style}"
            if options.match is None or fnmatchcase(cell, options.match):
                for mesh in options.meshes:
                    print(f"{cell} {mesh.text(style)} {options.dtype}")
    return PASSED


def _styles(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print every style with its group, its axes, what it does and what it needs."""
    del arguments, words
    known = (*STYLES, *plugins())
    width = max(len(style.name) for style in known)
    for style in known:
        axes = ",".join(style.axes)
        needs = f"; needs {style.needs}" if style.needs else ""
        print(f"{style.name:<{width}}  {style.group:<6}  {axes:<18}  {style.text}{needs}")
    print(
        "groups: engine, torch, plugin, user, all; user styles come from parallelize_NAME in the "
        f"file, plugins from the entry points {ENTRY_POINTS}"
    )
    return PASSED


def _schema(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print the JSON Schema of a record."""
    del arguments, words
    from spmd_verify.record import json_schema  # msgspec, not for --help

    print(json.dumps(json_schema(), indent=1))
    return PASSED


def _baseline(arguments: argparse.Namespace, words: list[str]) -> int:
    """Keep the state of cells, or compare with it."""
    del words
    from spmd_verify import baseline_verb  # msgspec, not for --help

    return baseline_verb.run(arguments, lambda text: print(text, flush=True), os.environ)


def _init(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print a CI job."""
    del words
    from spmd_verify import ci_snippets  # not for --help

    print(ci_snippets.snippet(arguments), end="")
    return PASSED


def _config(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print every setting and where it comes from."""
    from spmd_verify import config, config_show  # not for --help

    options = options_from(arguments, words)
    flags = flag_settings(arguments)
    print(config_show.render(config.read(Path.cwd()), flags, options))
    return PASSED
