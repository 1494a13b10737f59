"""Imports go one way: the rules of docs/design.md part 1, read off the source."""

import ast
from pathlib import Path

import pytest

# The modules that the command line and the reports need on a machine without torch, and
# what they may import: themselves, the standard library, msgspec, tabulate, rich, jinja2.
TORCH_FREE = {
    "__init__",
    "__main__",
    "arguments",
    "attended",
    "baseline_verb",
    "baselines",
    "baselines.baseline",
    "baselines.changes",
    "baselines.history",
    "cases",
    "cases.address",
    "cases.hooks",
    "cases.modules",
    "cases.reading",
    "causes.words",
    "ci_snippets",
    "cli",
    "compare_verb",
    "conditions",
    "config",
    "config_show",
    "doctor",
    "earlier",
    "errors",
    "examination",
    "examination.bisection",
    "examination.examiner",
    "examination.flow",
    "examination.teacher",
    "exit_codes",
    "garbage",
    "gate",
    "hf",
    "hf.shrink",
    "live_view",
    "mesh_spec",
    "options",
    "plain_structs",
    "planting",
    "planting.certificate",
    "planting.faults",
    "planting.plan",
    "prober",
    "progress",
    "pytest_messages",
    "pytest_plugin",
    "record",
    "record_changes",
    "refusals",
    "report_verb",
    "reporters",
    "reporters.certificates",
    "reporters.ctrf",
    "reporters.escaping",
    "reporters.github",
    "reporters.html",
    "reporters.html_cell",
    "reporters.html_data",
    "reporters.html_text",
    "reporters.html_view",
    "reporters.json",
    "reporters.junit",
    "reporters.md",
    "reporters.paragraphs",
    "reporters.suites",
    "reporters.terminal",
    "reporters.text",
    "reporters.trend",
    "run_gate",
    "runner",
    "runner.failures",
    "runner.folders",
    "runner.messages",
    "runner.specs",
    "settling",
    "shared_runs",
    "streams",
    "style_ids",
    "ties",
    "ties.replay",
    "user_code",
    "variants",
    "verdict",
    "version",
    "visible",
    "whole_file",
}
# The comparison core sees tensors and layouts, never a process group.
NO_DISTRIBUTED = {
    "cause",
    "causes",
    "compare",
    "dim_ranges",
    "dumps.dump",
    "dumps.judging",
    "examination.examine",
    "causes.exhibit",
    "examination.feeding",
    "examination.semantic",
    "judge",
    "layouts",
    "merge",
    "noise.runs",
    "record",
    "stored.store",
    "verdict",
}
# Only this one reads what a rank holds of a DTensor.
KNOWS_DTENSOR = {"dtensor_layouts"}
# Only these may import the engine.
MAY_IMPORT_SPMD = {"styles.graph", "styles.graph_modes", "runner.lockstep", "drawn.style"}
# hypothesis is there for those who fuzz, and nobody else's dependency.
MAY_IMPORT_HYPOTHESIS = {"drawn.strategies", "drawn.series", "drawn.fuzz"}


def _imports(path: Path, *, at_load_only: bool = False) -> set[str]:
    """Return every module that a file imports, `from a import b` as `a` and `a.b`.

    With `at_load_only`, imports inside functions and under TYPE_CHECKING do not count.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if at_load_only and (is_function or is_typing):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                assert child.level == 0, f"{path}: relative import"
                found.add(child.module)
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def _modules(package: Path) -> dict[str, Path]:
    """Return dotted names below a package with their files; the root is `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_engine_never_imports_the_checker(root: Path) -> None:
    guilty = {
        name
        for name, path in _modules(root / "spmd").items()
        if any(_is_in(imported, "spmd_verify") for imported in _imports(path))
    }

    assert guilty == set()


def test_only_the_fuzzer_imports_hypothesis(root: Path) -> None:
    guilty = {
        name
        for name, path in _modules(root / "spmd_verify").items()
        if any(_is_in(imported, "hypothesis") for imported in _imports(path))
    }

    assert guilty <= MAY_IMPORT_HYPOTHESIS


def test_only_the_plugin_imports_pytest(root: Path) -> None:
    guilty = {
        name
        for name, path in _modules(root / "spmd_verify").items()
        if any(_is_in(imported, "pytest") for imported in _imports(path))
    }

    assert guilty == {"pytest_plugin"}


def test_only_the_graph_styles_and_the_fuzzer_import_the_engine(root: Path) -> None:
    guilty = {
        name
        for name, path in _modules(root / "spmd_verify").items()
        if any(_is_in(imported, "spmd") for imported in _imports(path))
    }

    assert guilty <= MAY_IMPORT_SPMD


def test_the_torch_free_modules_import_no_torch_directly(root: Path) -> None:
    modules = _modules(root / "spmd_verify")
    assert set(modules) >= TORCH_FREE

    guilty = {
        name
        for name in TORCH_FREE
        if any(
            _is_in(imported, heavy)
            for imported in _imports(modules[name])
            for heavy in ("torch", "numpy", "transformers", "safetensors")
        )
    }

    assert guilty == set()


def test_the_torch_free_modules_load_only_each_other(root: Path) -> None:
    modules = _modules(root / "spmd_verify")
    reached = {
        (name, imported.removeprefix("spmd_verify."))
        for name in TORCH_FREE
        for imported in _imports(modules[name], at_load_only=True)
        if _is_in(imported, "spmd_verify")
    }

    assert {pair for pair in reached if pair[1] in modules and pair[1] not in TORCH_FREE} == set()


def test_the_comparison_core_imports_no_process_groups(root: Path) -> None:
    modules = _modules(root / "spmd_verify")
    guilty = {
        name
        for name in modules
        if (name in NO_DISTRIBUTED or name.startswith("causes."))
        and any(_is_in(imported, "torch.distributed") for imported in _imports(modules[name]))
    }

    assert set(modules) >= NO_DISTRIBUTED
    assert guilty == set()


def test_one_module_reads_the_local_tensors_of_dtensors(root: Path) -> None:
    guilty = {
        name
        for name, path in _modules(root / "spmd_verify").items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("to_local", "_local_tensor")
    }

    assert guilty == KNOWS_DTENSOR


def _layers(design: str, package: str) -> dict[str, int]:
    """Return the layer of every module and package that docs/design.md part 1 names."""
    line = next(line for line in design.splitlines() if line.startswith(f"{package}:  "))
    layers = enumerate(line.partition(":")[2].split("|"))
    return {name.strip("/"): layer for layer, names in layers for name in names.split()}


def test_packages_import_only_from_their_own_layer_and_below(root: Path) -> None:
    layers = _layers((root / "docs" / "design.md").read_text(), "spmd_verify")
    modules = _modules(root / "spmd_verify")
    packages = {path.parent.name for path in modules.values()} - {"spmd_verify", "page"}
    assert packages <= set(layers)

    guilty = {
        (name, imported)
        for name, path in modules.items()
        for imported in _imports(path, at_load_only=True)
        if _is_in(imported, "spmd_verify") and name.partition(".")[0] in layers
        if layers.get(imported.split(".")[1] if "." in imported else "", 0)
        > layers[name.partition(".")[0]]
    }

    assert guilty == set()


@pytest.mark.parametrize("package", ["spmd", "spmd_verify"])
def test_there_are_no_import_cycles(root: Path, package: str) -> None:
    modules = _modules(root / package)
    edges = {
        name: {
            imported.removeprefix(f"{package}.")
            for imported in _imports(path, at_load_only=True)
            if imported.startswith(f"{package}.")
        }
        & set(modules) - {name}
        for name, path in modules.items()
    }
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in finished:
            for below in sorted(edges[name]):
                visit(below, (*path, name))
            finished.add(name)

    for name in modules:
        visit(name, ())


@pytest.mark.parametrize("package", ["spmd", "spmd_verify"])
def test_modules_stay_below_450_lines_and_have_plain_ascii(root: Path, package: str) -> None:
    too_long = {
        name: lines
        for name, path in _modules(root / package).items()
        if (lines := len(path.read_text().splitlines())) > 450
    }

    assert too_long == {}
    assert all(path.read_text().isascii() for path in _modules(root / package).values())


def test_no_model_is_named_outside_the_data_file(root: Path) -> None:
    """A name is special-cased when it stands in the source as a string of its own."""
    from spmd_verify.hf.shrink import rules

    names = {*rules()["types"], *rules()["overrides"]}
    guilty = {
        (name, node.value)
        for package in ("spmd", "spmd_verify")
        for name, path in _modules(root / package).items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }

    assert guilty == set()
