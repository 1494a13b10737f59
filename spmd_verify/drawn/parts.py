"""Layers with members of their own or layers inside: routing, residuals, shared modules."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_verify.drawn.layers import LARGEST_WIDTH
from spmd_verify.drawn.writer import Layer, Writer, indented


@dataclass(frozen=True)
class Residual:
    """`x` plus layers of `x`, joined as their shapes allow."""

    layers: tuple[Layer, ...]
    join: str = "add"  # one of JOINS

    JOINS = ("add", "mul", "cat", "gate")

    def write(self, w: Writer) -> None:
        """Write the layers between saving and joining the input."""
        shape = (w.tokens, w.width)
        kept = w.fresh("kept")
        w.lines(f"{kept} = x", *w.inner(self.layers))
        if (w.tokens, w.width) != shape:
            w.lines(f"x = x + {kept}.mean((1, 2), keepdim=True)")
        elif self.join == "cat" and 2 * w.width <= LARGEST_WIDTH:
            w.lines(f"x = torch.cat([{kept}, x], -1)")
            w.width *= 2
        elif self.join == "gate":
            w.lines(f"x = {kept} * x.sigmoid() + x.detach() * 0.1")
        else:
            w.lines(f"x = x * {kept}.tanh()" if self.join == "mul" else f"x = x + {kept}")


@dataclass(frozen=True)
class Twice:
    """Layers applied twice with the same members, where they keep the shape."""

    layers: tuple[Layer, ...]

    def write(self, w: Writer) -> None:
        """Write the lines of the layers twice."""
        shape = (w.tokens, w.width)
        lines = w.inner(self.layers)
        w.lines(*lines)
        if shape == (w.tokens, w.width):
            w.lines(*lines)


@dataclass(frozen=True)
class Checkpointed:
    """Layers under activation checkpointing."""

    layers: tuple[Layer, ...]

    def write(self, w: Writer) -> None:
        """Write the layers as a local function that is checkpointed."""
        body, name = w.inner(self.layers), w.fresh("part")
        w.lines(f"def {name}(x):", indented([*body, "return x"], 4))
        w.lines(f"x = torch.utils.checkpoint.checkpoint({name}, x, use_reentrant=False)")


@dataclass(frozen=True)
class Dropout:
    """Dropout of elements, of channels, of tokens, or a noise that is added."""

    kind: str = "element"

    KINDS = ("element", "channel", "alpha", "sample", "noise", "bernoulli")

    def write(self, w: Writer) -> None:
        """Write the layer."""
        shape = f"{w.batch}, {w.tokens}, {w.width}"
        w.lines("x = " + {
            "element": "F.dropout(x, 0.3)",
            "channel": "F.dropout1d(x, 0.4)",
            "alpha": "F.alpha_dropout(x, 0.2, training=True)",
            "sample": f"x * (torch.rand({w.batch}, 1, 1) > 0.3)",
            "noise": f"x + 0.1 * torch.randn({shape})",
            "bernoulli": "x * torch.bernoulli(torch.full_like(x, 0.8))",
        }[self.kind])  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """`x` times a parameter of some shape, perhaps frozen, or a view of a larger one."""

    shape: str = "width"
    frozen: bool = False

    SHAPES = ("width", "scalar", "tokens", "both", "slice", "one", "joined", "softmax")

    def write(self, w: Writer) -> None:
        """Write the product."""
        t, c = w.tokens, w.width
        sizes: dict[str, tuple[int, ...]] = {
            "width": (c,), "scalar": (), "tokens": (t, 1), "both": (t, c), "slice": (c + 3,),
            "one": (1,), "joined": (c,), "softmax": (t, t),
        }  # fmt: skip
        p = w.parameter("scale", *sizes[self.shape], frozen=self.frozen)
        if self.shape == "slice":
            w.lines(f"x = x * {p}[2:{c + 2}] + {p}[:1]")
        elif self.shape == "joined":
            q = w.parameter("shift", c)
            w.lines(f"a, b = torch.cat([{p}, {q}]).view(2, {c}).unbind()", "x = x * a + b")
        elif self.shape == "softmax":
            w.lines(f"x = {p}.softmax(-1) @ x")
        else:
            w.lines(f"x = x * {p}")


@dataclass(frozen=True)
class Unused:
    """A parameter that no output depends on."""

    rows: int = 1

    def write(self, w: Writer) -> None:
        """Add the parameter only."""
        w.parameter("unused", self.rows, 2)


@dataclass(frozen=True)
class Positions:
    """A position table looked up by a range that is made in the step."""

    extra: int = 0

    def write(self, w: Writer) -> None:
        """Write the lookup."""
        table = w.member("positions", f"nn.Embedding({w.tokens + self.extra}, {w.width})")
        w.lines(f"x = x + {table}(torch.arange({w.tokens}))")


@dataclass(frozen=True)
class Experts:
    """Top-k routing over experts, combined by masks, gathers or index_add."""

    experts: int
    k: int = 1
    combine: str = "mask"  # one of COMBINES

    COMBINES = ("mask", "gather", "index_add", "capacity")

    def write(self, w: Writer) -> None:
        """Write router, choice and combination."""
        e, k, c = self.experts, min(self.k, self.experts), w.width
        gate = w.member("gate", f"nn.Linear({c}, {e})")
        table = w.parameter("experts", e, c, c)
        w.lines(f"p = {gate}(x).softmax(-1)", f"top, index = p.topk({k}, -1)")
        chosen = "torch.zeros_like(p).scatter(-1, index, top)"
        if self.combine == "gather":
            w.lines(f"y = torch.einsum('btc,ecd->bted', x, {table})")
            w.lines(f"y = y.gather(2, index[..., None].expand(-1, -1, -1, {c}))")
            w.lines("x = x + (y * top[..., None]).sum(2)")
            return
        w.lines(f"g = {chosen}")
        if self.combine == "capacity":
            w.lines("place = (g > 0).to(x.dtype).cumsum(1).cumsum(0)", "g = g * (place <= 4)")
        w.lines(f"x = x + torch.einsum('btc,bte,ecd->btd', x, g, {table})")
        if self.combine == "index_add":
            w.lines(f"load = torch.zeros({e}).index_add(0, index.flatten(), top.flatten())")
            w.lines("x = x + (load * p.mean((0, 1))).sum()")


@dataclass(frozen=True)
class Memory:
    """A buffer the forward reads and writes: a running mean, a counter, a codebook."""

    kind: str = "mean"

    KINDS = ("mean", "count", "codebook", "queue")

    def write(self, w: Writer) -> None:
        """Write the use of the buffer and its update."""
        c, value = w.width, "x.detach()"
        if self.kind == "count":
            name = w.buffer("count", "torch.tensor(0)")
            w.lines(f"{name} += {w.batch}", f"x = x * (1 + 1 / {name})")
        elif self.kind == "codebook":
            name = w.buffer("codes", f"torch.randn(3, {c})")
            w.lines(
                f"near = torch.cdist(x.detach().reshape(-1, {c}), {name}).argmin(-1)",
                "hot = F.one_hot(near, 3).to(x.dtype)",
                f"code = {name}[near].view_as(x)",
                f"{name}.mul_(0.9).add_(hot.t() @ {value}.reshape(-1, {c}), alpha=0.1)",
                "x = x + (code - x).detach() + 0.1 * code",
            )
        elif self.kind == "queue":
            name = w.buffer("queue", f"torch.randn(5, {c})")
            w.lines(
                f"queue = {name}.clone()",
                "x = x + (x @ queue.t()).softmax(-1) @ queue",
                f"{name}[:-1] = {name}[1:].clone()",
                f"{name}[-1] = {value}.mean((0, 1))",
            )
        else:
            name = w.buffer("mean", f"torch.zeros({c})")
            w.lines(f"x = x - {name}.clone()", f"{name}.lerp_({value}.mean((0, 1)), 0.1)")


@dataclass(frozen=True)
class InPlace:
    """Writes into a clone of `x`: whole, slices, rows, by index."""

    kind: str = "slice"

    KINDS = ("slice", "row", "whole", "index", "masked")

    def write(self, w: Writer) -> None:
        """Write the clone and what changes it."""
        w.lines("x = x.clone()", {
            "slice": f"x[:, :{max(1, w.tokens // 2)}] *= 2",
            "row": "x[0] = x[-1] * 0.5",
            "whole": "x.add_(0.1).relu_()",
            "index": "x.index_add_(1, torch.tensor([0]), x[:, -1:].clone())",
            "masked": "x[:, :, 0].masked_fill_(x[:, :, -1] > 0, 0.3)",
        }[self.kind])  # fmt: skip
