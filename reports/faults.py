"""The fault bench: every case in tests/faults run by the checker, as one table.

Each file holds broken styles and their corrected twins, and says in EXPECT what the checker must
find: the verdict, the stage and kind of cause, tensors and words. `make faults` writes
reports/faults.md and one JSON per file in reports/faults/.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "faults"
FOLDER = ROOT / "reports" / "faults"
PASSING = ("exact", "rounding", "undetermined")
# What a checker has to catch at the least, and where it stands: file and style.
ACCEPTANCE = {
    "unequal token counts under DDP": ("dp_label_counts_per_rank", "bad"),
    "a call around the wrapper": ("dp_inner_module_called", "bad"),
    "an unused parameter holds a bucket back": ("dp_skipped_layer_holds_bucket", "bad"),
    "fully_shard without the root": ("dp_fully_shard_leaves_root", "bad"),
    "initial values drawn per rank": ("st_init_on_shards", "bad"),
    "optimizer built before fully_shard": ("st_optimizer_first", "bad_fsdp"),
    "optimizer built before tensor parallel": ("st_optimizer_first", "bad_tp"),
    "norm weights under sequence parallel": ("mp_sp_norm_weights", "bad"),
    "bias added before the reduction": ("mp_row_bias_each_rank", "bad"),
    "fused projection cut as one matrix": ("mp_fused_qkv_chunk", "bad"),
    "full logits into a vocabulary-parallel loss": ("mp_full_logits_vocab_loss", "bad"),
    "rotary positions without offset": ("mp_rope_offset", "bad"),
    "loss times the context-parallel ranks": ("mp_loss_times_cp", "bad"),
    "expert gradients times the expert-parallel ranks": ("mp_experts_times_ep", "bad"),
    "pipeline scales earlier gradients again": ("mp_pp_calls_alike", "bad"),
    "tied embedding over stages": ("mp_tied_stages", "bad"),
    "gradients reduced twice, then clipped": ("dp_ddp_and_manual_sum", "bad"),
    "clipped by the norm of a shard": ("st_clip_norm_of_shard", "bad"),
    "clipped by the norm of a stage": ("mp_pp_clip_per_stage", "bad"),
    "LARS on shards": ("st_lars_local_trust", "bad"),
    "an orthogonalised update on shards": ("st_muon_rows", "bad"),
}


def expectations(path: Path) -> dict[str, dict[str, Any]]:
    """Return the EXPECT of a file without running it."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if isinstance(node, ast.Assign) and "EXPECT" in names:
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                module: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
                exec(compile(tree, str(path), "exec"), module)
                return module["EXPECT"]
    raise SystemExit(f"{path} has no EXPECT")


def run(path: Path, dtype: str) -> dict[str, Any]:
    """Run the checker on one file and hold every style against its expectation."""
    from spmd_verify.errors import SpmdVerifyError
    from spmd_verify.options import Options
    from spmd_verify.progress import Progress
    from spmd_verify.run import verify
    from spmd_verify.style_ids import TORCH

    expected = expectations(path)
    # A file without styles of its own is about built-in ones.
    built_in = tuple(name for name in expected if name in TORCH)
    options = Options(
        no_cache=True,
        targets=(str(path),),
        styles=built_in or ("user",),
        dtype=dtype,
        timeout_seconds=300.0,
        verbosity=-1,
    ).checked()
    progress, start = Progress(quiet=True), time.monotonic()
    try:
        record = verify(options, progress)
    except SpmdVerifyError as error:
        return {"file": path.name, "dtype": dtype, "error": str(error), "styles": []}
    finally:
        progress.close()
    cells = {cell.style: cell for cell in record.cells}
    styles = [held(name, due, cells.get(name)) for name, due in expected.items()]
    seconds = round(time.monotonic() - start, 1)
    return {"file": path.name, "dtype": dtype, "seconds": seconds, "styles": styles}


def held(name: str, due: dict[str, Any], cell: Any) -> dict[str, Any]:
    """Compare one cell with what its file expects."""
    found: dict[str, Any] = {"style": name, "expected": due["verdict"]}
    if cell is None:
        return {**found, "verdict": "no cell", "wrong": ["no such style"]}
    found |= {"verdict": cell.verdict, "message": cell.message}
    if due["verdict"] == "pass":
        return {**found, "wrong": [] if cell.verdict in PASSING else ["alarmed"],
                "cause": cell.cause.text if cell.cause else ""}  # fmt: skip
    cause, first = cell.cause, cell.first_divergence
    wrong = []
    kind = cause.kind if cause else ""
    is_reported = kind == "reported_value" and cell.verdict in PASSING
    if cell.verdict != due["verdict"] and not is_reported:
        wrong.append("not caught")
    stages = due.get("stage", [])
    stages = [stages] if isinstance(stages, str) else list(stages)
    if first is None or (stages and first.stage not in stages):
        wrong.append("stage")
    if due.get("kind") and kind not in due["kind"]:
        wrong.append("kind")
    named = set(cause.tensors if cause else []) | ({first.tensor} if first else set())
    missing = [tensor for tensor in due.get("tensors", []) if tensor not in named]
    if missing:
        wrong.append("tensors")
    report = " ".join([str(cause), str(first), cell.message])
    unsaid = [word for word in due.get("mentions", []) if str(word) not in report]
    if unsaid:
        wrong.append("mentions")
    if any(word in report for word in due.get("never", [])):
        wrong.append("never")
    return {
        **found,
        "stage": first.stage if first else "",
        "step": first.step if first else None,
        "tensor": first.tensor if first else "",
        "kind": kind,
        "due": {key: due.get(key) for key in ("kind", "stage", "tensors", "mentions")},
        "cause": cause.text if cause else "",
        "residual": str(cause.residual) if cause else "",
        "missing": missing,
        "unsaid": unsaid,
        "wrong": wrong,
    }


def render(results: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    styles = [(result, style) for result in results for style in result["styles"]]
    faults = [style for _, style in styles if style["expected"] != "pass"]
    twins = [style for _, style in styles if style["expected"] == "pass"]
    broken = [result for result in results if result.get("error")]

    def share(words: tuple[str, ...]) -> str:
        right = sum(not set(words) & set(style["wrong"]) for style in faults)
        return f"{right} of {len(faults)} ({right / max(len(faults), 1):.1%})"

    kinds = Counter(
        kind for style in faults for kind in (style.get("due", {}).get("kind") or [])[:1]
    )
    lines = [
        "# Fault bench",
        "",
        "Written by `make faults` (reports/faults.py): every file of tests/faults, real processes.",
        "",
        f"- faults caught: {share(('not caught',))}, over {len(kinds)} kinds "
        f"({', '.join(f'{kind} {count}' for kind, count in kinds.most_common())})",
        f"- first divergence at the right stage: {share(('not caught', 'stage'))}",
        f"- right tensors named: {share(('not caught', 'tensors'))}",
        f"- right kind of cause: {share(('not caught', 'kind'))}",
        f"- every word said: {share(('not caught', 'mentions'))}",
        f"- clean styles alarmed: {sum(bool(style['wrong']) for style in twins)} of {len(twins)}",
        f"- files that could not be run: {len(broken)}",
        "",
    ]
    lines += acceptance(results)
    rows = [
        [result["file"], result["dtype"], style["style"], style["verdict"], style.get("stage", ""),
         style.get("kind", ""), ", ".join(style["wrong"]) or "right"]
        for result, style in styles
    ]  # fmt: skip
    header = ["file", "dtype", "style", "verdict", "stage", "cause", "held against EXPECT"]
    return "\n".join([*lines, tabulate(rows, header, tablefmt="github", disable_numparse=True), ""])


def is_right(path: Path, dtype: str) -> bool:
    """Say whether a file's last result holds."""
    kept = FOLDER / f"{path.stem}-{dtype}.json"
    if not kept.exists():
        return False
    result = json.loads(kept.read_text())
    return not result.get("error") and not any(style["wrong"] for style in result["styles"])


def acceptance(results: list[dict[str, Any]]) -> list[str]:
    """Return what was said of the faults that have to be caught at the least, as Markdown."""
    found = {
        (result["file"].removesuffix(".py"), style["style"]): style
        for result in results
        for style in result["styles"]
    }
    lines = ["## Faults that have to be caught", ""]
    for title, key in ACCEPTANCE.items():
        style = found.get(key)
        if style is not None:
            verdict = "right" if not style["wrong"] else f"WRONG: {', '.join(style['wrong'])}"
            lines.append(
                f"- **{title}** ({key[0]}, {verdict}): {style.get('stage')}, {style.get('kind')}: "
                f"{style.get('cause')}"
            )
    return [*lines, ""]


def main() -> int:
    """Run the files asked for, then render all results that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="glob over file names")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th file, from i")
    parser.add_argument("--failed", action="store_true", help="only what was wrong last time")
    parser.add_argument("--render", action="store_true", help="only render")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    turn, parts = map(int, options.part.split("/"))
    files = sorted(CASES.glob("*.py"))
    chosen = [] if options.render else sorted(CASES.glob(f"{options.only}.py"))[turn::parts]
    if options.failed:
        chosen = [path for path in chosen if not is_right(path, options.dtype)]
    for path in chosen:
        result = run(path, options.dtype)
        (FOLDER / f"{path.stem}-{options.dtype}.json").write_text(json.dumps(result, indent=1))
        for style in result["styles"]:
            state = ", ".join(style["wrong"]) or "right"
            print(f"{path.stem} {style['style']}: {style['verdict']} {style.get('stage', '')} "
                  f"{style.get('kind', '')}: {state}", flush=True)  # fmt: skip
        if result.get("error"):
            print(f"{path.stem}: {result['error']}", flush=True)
    results = []
    for path in files:
        kept = sorted(FOLDER.glob(f"{path.stem}-*.json"))
        results += [json.loads(each.read_text()) for each in kept]
    (ROOT / "reports" / "faults.md").write_text(render(results))
    bad = [s for r in results for s in r["styles"] if s["wrong"]]
    return 1 if bad or any(r.get("error") for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
