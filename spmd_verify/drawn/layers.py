"""The layers drawn models are made of: plain specs that print as PyTorch. Torch-free.

Every layer takes `x` [batch, tokens, width] to a tensor of that form, whatever the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spmd_verify.drawn.writer import Layer, Writer

# Kept small so that a drawn model has about a hundred nodes and products stay in range.
LARGEST_TOKENS: Final = 8
LARGEST_WIDTH: Final = 12


@dataclass(frozen=True)
class Linear:
    """A linear layer, or one spelled as einsum or functional call."""

    width: int
    spelling: str = "module"  # one of SPELLINGS

    SPELLINGS = ("module", "nobias", "einsum", "functional", "matmul", "weight-norm",
                 "spectral-norm")  # fmt: skip

    def write(self, w: Writer) -> None:
        """Write the layer."""
        shape = (self.width, w.width)
        if self.spelling.endswith("-norm"):
            parametrise = self.spelling.replace("-", "_")
            text = f"nn.utils.parametrizations.{parametrise}(nn.Linear({w.width}, {self.width}))"
            w.lines(f"x = {w.member('linear', text)}(x)")
        elif self.spelling in ("module", "nobias"):
            tail = ", bias=False" if self.spelling == "nobias" else ""
            name = w.member("linear", f"nn.Linear({w.width}, {self.width}{tail})")
            w.lines(f"x = {name}(x)")
        else:
            weight = w.parameter("weight", *shape)
            w.lines({
                "einsum": f"x = torch.einsum('btc,dc->btd', x, {weight})",
                "functional": f"x = F.linear(x, {weight} / {weight}.norm())",
                "matmul": f"x = x @ {weight}.t()",
            }[self.spelling])  # fmt: skip
        w.width = self.width


@dataclass(frozen=True)
class Conv:
    """A convolution over the tokens, 1-D (0: transposed) or 2-D over tokens and width."""

    channels: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    ndim: int = 1

    def write(self, w: Writer) -> None:
        """Write the layer."""
        if self.ndim == 0:
            text = f"nn.ConvTranspose1d({w.width}, {self.channels}, {self.kernel})"
            w.lines(f"x = {w.member('conv', text)}(x.transpose(1, 2)).transpose(1, 2)")
            w.tokens, w.width = w.tokens + self.kernel - 1, self.channels
            return
        if self.ndim == 2:
            name = w.member("conv", f"nn.Conv2d(1, {self.channels}, 3, padding=1)")
            w.lines(f"x = {name}(x.unsqueeze(1)).mean(1)")
            return
        groups = w.divisor(self.groups, w.width)
        channels = -(-self.channels // groups) * groups
        padding = self.kernel // 2
        options = f"{self.kernel}, stride={self.stride}, padding={padding}, groups={groups}"
        name = w.member("conv", f"nn.Conv1d({w.width}, {channels}, {options})")
        w.lines(f"x = {name}(x.transpose(1, 2)).transpose(1, 2)")
        w.tokens = (w.tokens + 2 * padding - self.kernel) // self.stride + 1
        w.width = channels


@dataclass(frozen=True)
class Norm:
    """A normalisation over features, groups, tokens or the batch."""

    kind: str  # one of KINDS

    KINDS = ("layer", "rms", "group", "batch", "batch-cumulative", "batch-plain", "instance",
             "l2", "standard")  # fmt: skip

    def write(self, w: Writer) -> None:
        """Write the layer; BatchNorm needs more than one value per channel."""
        c = w.width
        if self.kind in ("layer", "rms"):
            cls = "LayerNorm" if self.kind == "layer" else "RMSNorm"
            w.lines(f"x = {w.member('norm', f'nn.{cls}({c})')}(x)")
        elif self.kind == "l2":
            w.lines("x = F.normalize(x + 0.1, dim=-1)")
        elif self.kind == "standard":
            w.lines("x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()")
        elif self.kind == "group":
            text = f"nn.GroupNorm({w.divisor(3, c)}, {c})"
            w.lines(f"x = {w.member('norm', text)}(x.transpose(1, 2)).transpose(1, 2)")
        elif w.batch * w.tokens > 1 and (self.kind != "instance" or w.tokens > 1):
            text = {
                "batch": f"nn.BatchNorm1d({c})",
                "batch-cumulative": f"nn.BatchNorm1d({c}, momentum=None)",
                "batch-plain": f"nn.BatchNorm1d({c}, affine=False, track_running_stats=False)",
                "instance": f"nn.InstanceNorm1d({c}, affine=True)",
            }[self.kind]
            w.lines(f"x = {w.member('norm', text)}(x.transpose(1, 2)).transpose(1, 2)")


@dataclass(frozen=True)
class Attention:
    """Self-attention over the tokens, fused or spelled out."""

    heads: int
    kind: str = "causal"  # one of KINDS
    head_width: int = 2

    KINDS = ("full", "causal", "boolean", "bias", "manual", "grouped", "over-batch", "module")

    def write(self, w: Writer) -> None:
        """Write the layer."""
        h, d, t = self.heads, self.head_width, w.tokens
        if self.kind == "over-batch":
            w.lines("y = x.flatten(1)", "y = (y @ y.t() / 3).softmax(-1) @ y", "x = y.view_as(x)")
            return
        if self.kind == "module":
            text = f"nn.MultiheadAttention({w.width}, {w.divisor(h, w.width)}, batch_first=True)"
            w.lines(f"x, _ = {w.member('attention', text)}(x, x, x)")
            return
        kv = w.divisor(2, h) if self.kind == "grouped" else h
        width = (h + 2 * kv) * d
        qkv = w.member("qkv", f"nn.Linear({w.width}, {width})")
        out = w.member("out", f"nn.Linear({h * d}, {w.width})")
        w.lines(f"q, k, v = {qkv}(x).split([{h * d}, {kv * d}, {kv * d}], -1)")
        for name, heads in (("q", h), ("k", kv), ("v", kv)):
            w.lines(f"{name} = {name}.reshape({w.batch}, {t}, {heads}, {d}).transpose(1, 2)")
        w.lines(*self._mixed(w, t, d))
        w.lines(f"x = {out}(y.transpose(1, 2).reshape({w.batch}, {t}, {h * d}))")

    def _mixed(self, w: Writer, t: int, d: int) -> list[str]:
        call = "y = F.scaled_dot_product_attention(q, k, v"
        if self.kind == "full":
            return [call + ")"]
        if self.kind == "causal":
            return [call + ", is_causal=True)"]
        if self.kind == "grouped":
            return [call + ", is_causal=True, enable_gqa=True)"]
        if self.kind == "boolean":
            mask = w.buffer("mask", f"torch.rand({t}, {t}) + torch.eye({t}) > 0.5")
            return [call + f", attn_mask={mask})"]
        bias = w.parameter("bias", self.heads, t, t)
        if self.kind == "bias":
            return [call + f", attn_mask={bias})"]
        mask = f"torch.ones({t}, {t}, dtype=torch.bool).triu(1)"
        return [
            f"scores = q @ k.transpose(-2, -1) / {d} ** 0.5 + {bias}",
            f"y = scores.masked_fill({mask}, float('-inf')).softmax(-1) @ v",
        ]


@dataclass(frozen=True)
class Recurrent:
    """A GRU, LSTM or plain recurrent layer, batch first or second."""

    width: int
    kind: str = "GRU"
    batch_first: bool = True
    bidirectional: bool = False

    def write(self, w: Writer) -> None:
        """Write the layer."""
        options = f"batch_first={self.batch_first}, bidirectional={self.bidirectional}"
        name = w.member("rnn", f"nn.{self.kind}({w.width}, {self.width}, {options})")
        if self.batch_first:
            w.lines(f"x, _ = {name}(x)")
        else:
            w.lines(f"x, _ = {name}(x.transpose(0, 1))", "x = x.transpose(0, 1)")
        w.width = self.width * (1 + self.bidirectional)


# Expressions of x that keep its shape; {b}, {t} and {c} are its sizes.
SAME_SHAPE: Final = (
    "x.tanh()", "F.relu(x)", "F.gelu(x)", "F.silu(x)", "F.softplus(x)", "F.leaky_relu(x, 0.1)",
    "F.elu(x)", "x.sigmoid()", "x.sin() * 2", "x.clamp(-1, 0.7)", "x.abs().sqrt().clamp(min=0.1)",
    "x.softmax(-1)", "x.softmax(1)", "x.log_softmax(-1)", "x.softmax(0) * 3",
    "x.cumsum(1)", "x.cumsum(-1)", "x.cumsum(0) / {b}", "x.flip(1)", "x.flip(0)",
    "x.roll(1, 1)", "x.roll(1, 0)", "x.roll(-1, -1)", "x.sort(-1).values",
    "x - x.mean(-1, keepdim=True)", "x - x.mean(0)", "x - x.mean((0, 1))", "x - x.sum(1, True)",
    "x - x.amax(-1, keepdim=True)", "x - x.max(0).values", "x - x.amin((0, 2), keepdim=True)",
    "x - x.logsumexp(-1, keepdim=True)", "x / (1 + x.norm(dim=-1, keepdim=True))",
    "x / (1 + x.norm())", "x / (1 + x.std(-1, keepdim=True, unbiased=False))",
    "x * x.sum() / (1 + x.abs().sum())", "x + x.detach().mean()", "x.masked_fill(x > 0.5, 0.5)",
    "torch.where(x > 0, x, 0.1 * x.exp())", "torch.maximum(x, x.mean(0))",
    "x * torch.linspace(0.5, 1, {t})[:, None]", "x + torch.arange({c}) / {c}",
    "x + torch.arange({b})[:, None, None] / {b}", "x * (torch.arange({t}) % 2)[None, :, None]",
    "torch.cat([x[1:], x[:1]])", "torch.cat([x[:, 1:], x[:, :1]], 1)",
    "torch.stack([x, x.flip(1)]).sum(0)", "torch.stack([x, x * 2], -1).prod(-1)",
    "F.pad(x, (0, 0, 1, 0))[:, :-1]", "F.pad(x, (1, 1))[..., 2:]", "x.tril()", "x.triu(-1)",
    "torch.einsum('itc,jtc->ijt', x, x).mean(1)[..., None] / {c} + x",
    "torch.einsum('btc,bsc->bts', x, x).tanh() @ x / {t}",
    "x.reshape({b} * {t}, {c}).tanh().view({b}, {t}, {c})",
    "x.transpose(0, 1).reshape({t} * {b}, {c}).cos().view({t}, {b}, {c}).transpose(0, 1)",
    "x.reshape(-1).sin().view(x.shape)", "x.unbind(1)[0][:, None] + x",
    "x.transpose(0, 2).contiguous().exp().transpose(0, 2) / 3", "x.expand(2, -1, -1, -1).mean(0)",
    "x.repeat(2, 1, 1)[:{b}] + x.repeat(1, 2, 1)[:, {t}:]", "x.gather(1, x.argsort(1))",
    "x + F.one_hot(x.argmax(-1), {c}).to(x.dtype)", "x.new_zeros(x.shape).copy_(x) + x",
    "x + x.new_ones({t}, {c}).cumsum(0) / {t}", "x.movedim(1, 0).movedim(0, 1)",
    "x.prod(1, keepdim=True).tanh() + x", "x.diagonal(0, 0, 1).sum() * 0.1 + x",
    "x.view({b}, 1, {t}, {c}).squeeze(1)", "x.swapaxes(1, 2).clone().swapaxes(1, 2)",
    "x.topk(1, dim=-1).values + x", "x.lerp(x.mean(0), 0.3)",
    "x.to(torch.float64).reciprocal().tanh()",
    "torch.addcmul(x, x, x.mean(0), value=0.2)", "x.index_select(0, torch.arange({b}).flip(0))",
    "x.scatter_add(1, torch.zeros({b}, 1, {c}, dtype=torch.long), x[:, -1:])",
    "x.index_put((torch.tensor([0]),), x[-1:] * 0.5)", "x.index_fill(1, torch.tensor([0]), 0.5)",
    "torch.where(torch.arange({b})[:, None, None] % 2 == 0, x, x.flip(0))",
    "x.cummax(1).values", "x.cumprod(-1).tanh()", "x.logcumsumexp(1)",
    "x.diff(dim=1, prepend=x[:, :1])",
    "x.kthvalue(1, -1, True).values + x", "x.median(-1, keepdim=True).values + x",
    "torch.logaddexp(x, x.mean(0))", "x @ (x.transpose(1, 2) @ x).softmax(-1)",
    "x.mT.softmax(-1).mT",
    "torch.outer(x.sum((1, 2)), x.sum((0, 2))).mean() * 0.01 + x",
    "torch.baddbmm(x, x @ x.transpose(1, 2), x, beta=0.5, alpha=0.1)",
    "F.scaled_dot_product_attention(x, x, x)", "x.take_along_dim(x.argsort(-1), -1)",
    "(x.flatten(0, 1).t() @ x.flatten(0, 1) / {b})[:1].sum() * 0.1 + x",
    "torch.fft.rfft(x, dim=1, n=4).abs().mean(1, keepdim=True) + x",
    "torch.cdist(x, x.flip(0) * 0.5).mean(-1, keepdim=True) + x",
    "torch.unbind(torch.stack([x.flatten(), x.flatten().cos()]))[1].view_as(x)",
    "x.permute(2, 1, 0).reshape({c}, -1).softmax(-1).reshape({c}, {t}, {b}).permute(2, 1, 0)",
)  # fmt: skip


@dataclass(frozen=True)
class Pointwise:
    """An expression of `x` with its shape: activations, reductions, shifts, reorderings."""

    text: str

    def write(self, w: Writer) -> None:
        """Write the expression with the sizes filled in."""
        w.lines("x = " + self.text.format(b=w.batch, t=w.tokens, c=w.width))


# Expressions that change the shape, with the sizes after them as functions of (tokens, width).
RESHAPED: Final = {
    "x.transpose(1, 2)": lambda t, c: (c, t),
    "x[:, ::2]": lambda t, c: (-(-t // 2), c),
    "x[:, -1:]": lambda _t, c: (1, c),
    "x[..., 1:] if x.size(-1) > 1 else x": lambda t, c: (t, max(1, c - 1)),
    "x[:, 1:] if x.size(1) > 1 else x": lambda t, c: (max(1, t - 1), c),
    "x.mean(1, keepdim=True)": lambda _t, c: (1, c),
    "x.amax(2, keepdim=True)": lambda t, _c: (t, 1),
    "x.flatten(1)[:, None]": lambda t, c: (1, t * c),
    "x.flatten(1)[..., None]": lambda t, c: (t * c, 1),
    "x.reshape({b}, {c}, {t})": lambda t, c: (c, t),
    "torch.cat([x, -x], 1)": lambda t, c: (2 * t, c),
    "torch.cat([x, x.cos()], -1)": lambda t, c: (t, 2 * c),
    "x.repeat_interleave(2, 1)": lambda t, c: (2 * t, c),
    "x.tile(1, 1, 2)": lambda t, c: (t, 2 * c),
    "F.pad(x, (1, 0, 0, 1))": lambda t, c: (t + 1, c + 1),
    "F.glu(torch.cat([x, x.sin()], -1))": lambda t, c: (t, c),
    "F.max_pool1d(x, 2, ceil_mode=True)": lambda t, c: (t, -(-c // 2)),
    "F.avg_pool1d(x.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2)": lambda t, c: (
        -(-t // 2), c),
    "F.interpolate(x.transpose(1, 2), scale_factor=2.0).transpose(1, 2)": lambda t, c: (2 * t, c),
    "x.unfold(1, 1, 1).squeeze(-1)": lambda t, c: (t, c),
    "torch.stack([x, x.exp() / 3], 2).flatten(1, 2)": lambda t, c: (2 * t, c),
    "torch.cat(x.chunk(2, 1)[::-1], 1)": lambda t, c: (t, c),
    "torch.cat([p * (i + 1) for i, p in enumerate(x.split(2, -1))], -1)": lambda t, c: (t, c),
    "x.index_select(1, torch.tensor([0, {t} - 1, 0]))": lambda _t, c: (3, c),
    "x[:, [0, 0]]": lambda _t, c: (2, c),
    "torch.einsum('btc,bsc->bst', x, x)": lambda t, _c: (t, t),
    "F.adaptive_avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)": lambda _t, c: (2, c),
    "F.max_pool1d(x.transpose(1, 2), 2, 1, 1).transpose(1, 2)": lambda t, c: (t + 1, c),
    "torch.cat([x[:, :1], x, x[:, -1:]], 1)": lambda t, c: (t + 2, c),
    "x.unfold(1, 2, 1).mean(-1) if x.size(1) > 1 else x": lambda t, c: (max(1, t - 1), c),
    "torch.einsum('btc,btd->bcd', x, x) / {t}": lambda _t, c: (c, c),
}  # fmt: skip


@dataclass(frozen=True)
class Reshape:
    """An expression that changes tokens and width."""

    text: str

    def write(self, w: Writer) -> None:
        """Write the expression unless the result would grow too large."""
        tokens, width = RESHAPED[self.text](w.tokens, w.width)
        if tokens <= LARGEST_TOKENS and width <= LARGEST_WIDTH:
            w.lines("x = " + self.text.format(b=w.batch, t=w.tokens, c=w.width))
            w.tokens, w.width = tokens, width


LAYERS: tuple[type[Layer], ...] = (
    Linear, Conv, Norm, Attention, Recurrent, Pointwise, Reshape,
)  # fmt: skip
