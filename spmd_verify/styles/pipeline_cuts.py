"""Where a model is cut into pipeline stages: in front of modules that run once, in order.

A chain is made of *links*: the model's blocks and the other modules with parameters around them.
Where those are fewer than the stages, the largest link is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import nn

from spmd_verify.errors import Unsupported


def stage_links(
    style: str,
    model: nn.Module,
    blocks: Sequence[str],
    run: Callable[[nn.Module], object],
    stages: int,
) -> list[list[str]]:
    """Return the links of every stage, by path, in the order in which they run.

    Args:
        style: For messages.
        model: Whole; not changed.
        blocks: Paths of its blocks.
        run: Runs one forward.
        stages: How many are wanted.

    Raises:
        Unsupported: `no-chain`, where fewer links than stages run once each, one after the
            other.
    """
    calls = _calls(model, run)
    links = _opened(model, _links(model, blocks), calls, stages)
    sizes = _sizes(model, links)
    chain = [path for path in calls if path in sizes and calls.count(path) == 1]
    cut = balanced([sizes[path] for path in chain], stages)
    if cut is None:
        chain = [path for path in chain if sizes[path]]
        shown = ", ".join(chain[:6]) + (", ..." if len(chain) > 6 else "")
        raise Unsupported(
            f"{style} does not take this case: the model is no chain of {stages} parts. Modules "
            f"with trainable parameters that run once, one after the other: {len(chain)} "
            f"({shown or 'none'}). Use at most {max(len(chain), 1)} stages, or write "
            f"parallelize_NAME and step_NAME with stages of your own",
            slug="no-chain",
        )
    return [chain[start:stop] for start, stop in cut]


def balanced(sizes: Sequence[int], parts: int) -> list[tuple[int, int]] | None:
    """Return `(start, stop)` of consecutive parts whose largest sum is smallest.

    None where a part would be empty or have a sum of 0.
    """
    sums = [0, *(sum(sizes[: i + 1]) for i in range(len(sizes)))]

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest sum of the rest in `left` parts, and where they end."""
        if left == 1:
            size = sums[-1] - sums[start]
            return (float(size) if size else math.inf), (len(sizes),)
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for stop in range(start + 1, len(sizes) - left + 2):
            size = sums[stop] - sums[start]
            rest, ends = best(stop, left - 1)
            largest = max(float(size), rest) if size else math.inf
            if largest < found[0]:
                found = (largest, (stop, *ends))
        return found

    if len(sizes) < parts:
        return None
    largest, ends = best(0, parts)
    return None if math.isinf(largest) else list(zip((0, *ends), ends, strict=False))


def _calls(model: nn.Module, run: Callable[[nn.Module], object]) -> list[str]:
    """Return the paths of the modules whose forward begins, in order, in one run."""
    calls: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _module, _args, path=path: calls.append(path))
        for path, module in model.named_modules()
    ]
    with torch.no_grad():
        run(model)
    for handle in handles:
        handle.remove()
    return calls


def _links(model: nn.Module, blocks: Sequence[str], path: str = "") -> Iterator[str]:
    """Give the paths of the blocks and of the largest modules beside them, in model order."""
    for name, child in _members(model, path):
        if name in blocks or not any(block.startswith(f"{name}.") for block in blocks):
            yield name
        else:
            yield from _links(child, blocks, name)


def _members(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Give the children with parameters by path; those of containers without a forward too."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _members(child, full)
        else:
            yield full, child


def _opened(model: nn.Module, links: Iterator[str], calls: Sequence[str], stages: int) -> list[str]:
    """Return the links, the largest replaced by its members until there are enough."""
    found = list(links)
    once = {path for path in calls if calls.count(path) == 1}
    while len(once.intersection(found)) < stages:
        sizes = _sizes(model, found)
        members = {
            path: [name for name, _ in _members(model.get_submodule(path), path) if name in once]
            for path in found
        }
        openable = [path for path in found if len(members[path]) > 1 or path not in once]
        openable = [path for path in openable if members[path]]
        if not openable:
            break
        largest = max(openable, key=lambda path: sizes[path])
        at = found.index(largest)
        found[at : at + 1] = members[largest]
    return found


def _sizes(model: nn.Module, paths: Sequence[str]) -> Mapping[str, int]:
    """Return the trainable elements of every module; what several share counts in the first."""
    seen: set[int] = set()
    sizes = {}
    for path in paths:
        own = [p for p in model.get_submodule(path).parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes[path] = sum(p.numel() for p in own if p.requires_grad)
    return sizes
