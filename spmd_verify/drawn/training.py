"""The rest of a drawn program: inputs, loss, optimizer and training step. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spmd_verify.drawn.writer import Writer, indented


@dataclass(frozen=True)
class Inputs:
    """What a step is called with.

    Attributes:
        batch: Samples.
        tokens: Size of the dim after (or, time first, before) the batch.
        width: Features per token; the embedding's width where inputs are ids.
        kind: `features` [batch, tokens, width] or `ids` [batch, tokens].
        time_first: Whether the batch is on dim 1 of the inputs.
        extra: Whether an argument without a batch dim is passed too.
    """

    batch: int
    tokens: int = 2
    width: int = 3
    kind: str = "features"
    time_first: bool = False
    extra: bool = False

    def start(self, w: Writer) -> None:
        """Write the lines that turn the argument into `x` [batch, tokens, width]."""
        if self.time_first:
            w.lines("x = x.transpose(0, 1)")
        if self.kind == "ids":
            w.vocabulary = 5
            w.members.append(f"self.embedding = nn.Embedding(5, {self.width})")
            w.lines("x = self.embedding(x)")

    def arguments(self, parts: int = 1) -> dict[str, str]:
        """Return the expressions of the model's arguments; `g` is a generator.

        Args:
            parts: Micro-batches of `batch` samples in the global batch.
        """
        batch = parts * self.batch
        sizes = (self.tokens, batch) if self.time_first else (batch, self.tokens)
        shape = ", ".join(str(n) for n in sizes)
        if self.kind == "ids":
            arguments = {"x": f"torch.randint(5, ({shape}), generator=g)"}
        else:
            arguments = {"x": f"torch.randn({shape}, {self.width}, generator=g)"}
        if self.extra:
            arguments["extra"] = "torch.randn(3, generator=g)"
        return arguments

    def batch_dims(self) -> dict[str, int | None]:
        """Return {argument: batch dim or None} of the model's arguments."""
        dims: dict[str, int | None] = {"x": int(self.time_first)}
        return dims | ({"extra": None} if self.extra else {})


# Classes of a head that is not tied.
_WORDS: Final = 4

# Loss -> the lines that compute it from `out` [batch, tokens, width] and the target. {b},
# {t}, {c} are its sizes. Cross entropies have logits `out` [batch, tokens, classes].
LOSSES: Final = {
    "square": ("loss = (out + 0.1 * out ** 3).pow(2).mean()",),
    "mse": ("loss = F.mse_loss(out, target)",),
    "mse-sum": ("loss = F.mse_loss(out, target, reduction='sum')",),
    "smooth": ("loss = F.smooth_l1_loss(out, target, beta=0.5)",),
    "weighted": (
        "loss = (F.mse_loss(out, target, reduction='none').mean((1, 2)) * torch.arange({b})).sum()",
    ),
    "masked": (
        "mask = (target > 0).to(out.dtype)",
        "loss = ((out - target) ** 2 * mask).sum() / mask.sum().clamp(min=1)",
    ),
    "bce": ("loss = F.binary_cross_entropy_with_logits(out, (target > 0).to(out.dtype))",),
    "kl": ("loss = F.kl_div(out.log_softmax(-1), target.softmax(-1), reduction='batchmean')",),
    "entropy": ("loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-1)",),
    "entropy-sum": (
        "loss = F.cross_entropy(out.transpose(1, 2), target, ignore_index=-1, reduction='sum')",
    ),
    "entropy-smooth": (
        "loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-1, "
        "label_smoothing=0.1)",
    ),
    "entropy-weights": (
        "weight = torch.linspace(0.5, 1.5, {c})",
        "loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), weight, ignore_index=-1)",
    ),
    "nll-shifted": (
        "logits = out.log_softmax(-1)[:, :-1].flatten(0, 1)",
        "nll = F.nll_loss(logits, target[:, 1:].flatten(), ignore_index=-1, reduction='sum')",
        "loss = nll / (target[:, 1:] >= 0).sum().clamp(min=1)",
    ),
    "contrastive": (
        "z = F.normalize(out.mean(1) + 0.1, dim=-1)",
        "loss = F.cross_entropy(z @ z.t() / 0.5, torch.arange({b}))",
    ),
    "triplet": (
        "z = out.flatten(1)",
        "loss = F.triplet_margin_loss(z, z.roll(1, 0) * 0.5, z.flip(0), margin=2.0)",
    ),
    "spread": ("loss = out.var(0, unbiased=False).sum() - out.mean().exp() + out.std()",),
    "penalty": (
        "trained = [p for p in model.parameters() if p.requires_grad]",
        "grads = torch.autograd.grad(out.pow(2).mean(), trained, create_graph=True, "
        "allow_unused=True)",
        "loss = out.mean() + sum(g.pow(2).sum() for g in grads if g is not None)",
    ),
    "vector-norm": ("loss = (out - target).norm()",),
    "max": ("loss = (out - target).abs().amax((1, 2)).mean() + out.logsumexp((0, 1)).sum()",),
}
CLASSIFIED: Final = tuple(name for name in LOSSES if name.startswith(("entropy", "nll")))


@dataclass(frozen=True)
class Loss:
    """The end of the model and the loss.

    Attributes:
        kind: One of `LOSSES`.
        tied: Cross entropies only: logits from the input embedding's weight if there is one.
        returned: Whether the step returns the model's output too.
    """

    kind: str = "square"
    tied: bool = False
    returned: bool = False

    def finish(self, w: Writer) -> None:
        """Write the head where the loss needs classes."""
        if self.kind in CLASSIFIED:
            if self.tied and w.vocabulary:
                if w.width != self._embedded(w):
                    name = w.member("back", f"nn.Linear({w.width}, {self._embedded(w)})")
                    w.lines(f"x = {name}(x)")
                w.lines("x = F.linear(x, self.embedding.weight)")
                w.width = w.vocabulary
            else:
                name = w.member("head", f"nn.Linear({w.width}, {_WORDS})")
                w.lines(f"x = {name}(x)")
                w.width = _WORDS
        w.lines("return x")

    @staticmethod
    def _embedded(w: Writer) -> int:
        text = next(m for m in w.members if m.startswith("self.embedding"))
        return int(text.rpartition(",")[2].rstrip(")"))

    def target(self, w: Writer, parts: int = 1) -> str | None:
        """Return the expression of the target, None if the loss has none.

        Args:
            w: With the finished model.
            parts: Micro-batches in the global batch.
        """
        batch = parts * w.batch
        if self.kind in CLASSIFIED:
            # Unequal counts: the further down the batch, the more labels are ignored.
            shape = f"({batch}, {w.tokens})"
            kept = f"torch.rand({shape}, generator=g) > torch.arange({batch})[:, None] / {batch}"
            return f"torch.randint({w.width}, {shape}, generator=g).where({kept}, -1)"
        if any("target" in line for line in LOSSES[self.kind]):
            return f"torch.randn({batch}, {w.tokens}, {w.width}, generator=g)"
        return None

    def lines(self, w: Writer) -> list[str]:
        """Return the lines that compute `loss` from `out`."""
        return [t.format(b=w.batch, t=w.tokens, c=w.width) for t in LOSSES[self.kind]]


# None that keeps numbers in the default dtype (NAdam's product of momenta): an island of float32
# in float64, where rounding decides every value.
OPTIMIZERS: Final = {
    "sgd": "torch.optim.SGD({p}, lr=0.1)",
    "momentum": "torch.optim.SGD({p}, lr=0.1, momentum=0.9, nesterov=True)",
    "decay": "torch.optim.SGD({p}, lr=0.1, momentum=0.5, weight_decay=0.1, dampening=0.1)",
    "adam": "torch.optim.Adam({p}, lr=0.01)",
    "adamw": "torch.optim.AdamW({p}, lr=0.01, betas=(0.8, 0.9), foreach=True)",
    "amsgrad": "torch.optim.Adam({p}, lr=0.01, amsgrad=True, weight_decay=0.1)",
    "rmsprop": "torch.optim.RMSprop({p}, lr=0.01, momentum=0.5, centered=True)",
    "adagrad": "torch.optim.Adagrad({p}, lr=0.05)",
    "tensor-rate": "torch.optim.SGD({p}, lr=torch.tensor(0.1).double(), momentum=0.5)",
    "adamax": "torch.optim.Adamax({p}, lr=0.01)",
    "adadelta": "torch.optim.Adadelta({p}, lr=1.0)",
    "adafactor": "torch.optim.Adafactor({p}, lr=0.05)",
    "hand": "Hand({p})",
    "none": "",
}

# Element-wise momentum and a per-tensor factor, as LARS has one.
HAND: Final = """
class Hand(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"].lerp_(p.grad, 0.3)
                trust = p.norm() / (1 + p.grad.norm())
                p.add_(average * trust, alpha=-group["lr"])
"""


# Clipping -> the lines between backward and update.
CLIPS: Final = {
    "none": (),
    "norm": ("norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)",),
    "value": ("nn.utils.clip_grad_value_(model.parameters(), 0.05)",),
    "norm-inf": ("norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type='inf')",),
    "norm-each": (
        "for p in model.parameters():",
        "    nn.utils.clip_grad_norm_([p], 0.2)",
    ),
    "by-hand": (
        "grads = [p.grad for p in model.parameters() if p.grad is not None]",
        "norm = torch.stack([g.norm() for g in grads]).norm()",
        "for g in grads:",
        "    g.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))",
    ),
}

# Second loss -> the lines behind the first one. {loss}, {both} and {aux} are what is divided by
# the number of backward passes, {other} the model called on the batch in reversed order.
SECOND_LOSSES: Final = {
    "none": ("{loss}.backward()",),
    "sum": ("aux = 0.1 * out.pow(2).mean()", "{both}.backward()"),
    "twice": (
        "aux = 0.1 * out.pow(2).mean()",
        "{loss}.backward(retain_graph=True)",
        "{aux}.backward()",
    ),
    "other-forward": (
        "{loss}.backward()",
        "aux = 0.1 * {other}.pow(2).mean()",
        "{aux}.backward()",
    ),
}

# In-step schedule -> what it sets before the forward, and after the update.
_GROUPS: Final = "for group in optimizer.param_groups:"
SCHEDULES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "none": ((), ()),
    "decay": ((), (_GROUPS, "    group['lr'] *= 0.5")),
    "warmup": (
        (
            _GROUPS,
            "    group['passed'] = group.get('passed', 0) + 1",
            "    group['lr'] = 0.02 * group['passed']",
        ),
        (),
    ),
    "weight-decay": ((_GROUPS, "    group['weight_decay'] = group['lr'] / 2"), ()),
    "scheduler": ((), ("optimizer.schedule.step()",)),
    "buffer": (("model.passed += 1",), ()),
}


@dataclass(frozen=True)
class Training:
    """How a step trains.

    Attributes:
        optimizer: One of `OPTIMIZERS`; `none` updates by hand in the step.
        clip: One of `CLIPS`.
        accumulate: Backward passes per step, each with its own random draws.
        zero: When gradients are cleared: `before`, `after`, `zeros` (kept), `never`.
        groups: Whether one-dim parameters are a group with a rate of their own.
        warm: Eager steps before the first compiled one, so that state exists.
        micro: Whether each backward pass has its own part of the batch, or all of it.
        second: One of `SECOND_LOSSES`.
        schedule: One of `SCHEDULES`; without an optimizer only `buffer` does something.
    """

    optimizer: str = "sgd"
    clip: str = "none"
    accumulate: int = 1
    zero: str = "before"
    groups: bool = False
    warm: int = 0
    micro: bool = False
    second: str = "none"
    schedule: str = "none"

    @property
    def parts(self) -> int:
        """Return how many times the model's batch the global batch is."""
        return self.accumulate if self.micro else 1

    @property
    def is_scheduled(self) -> bool:
        """Say whether a step leaves other numbers in Python than it found."""
        return self.schedule not in ("none", "buffer") and self.optimizer != "none"

    def finish(self, w: Writer) -> None:
        """Add the buffer that a schedule counts in."""
        if self.schedule == "buffer":
            w.members.append("self.register_buffer('passed', torch.zeros(()))")

    def optimizer_lines(self) -> list[str]:
        """Return the body of `get_optimizer`; nothing where the step needs none."""
        if self.optimizer == "none":
            return []
        text = OPTIMIZERS[self.optimizer].format(
            p="groups" if self.groups else "model.parameters()"
        )
        groups = [
            "small = [p for p in model.parameters() if p.dim() < 2]",
            "large = [p for p in model.parameters() if p.dim() >= 2]",
            "groups = [{'params': p, 'lr': 0.02 * (i + 1)} "
            "for i, p in enumerate((small, large)) if p]",
        ]
        scheduled = [
            f"optimizer = {text}",
            "optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)",
            "return optimizer",
        ]
        made = scheduled if self.schedule == "scheduler" else [f"return {text}"]
        return [*(groups if self.groups else []), *made]

    def step_lines(
        self, forward: str, loss: list[str], results: list[str], dims: dict[str, int | None]
    ) -> list[str]:
        """Return the body of `step`, its batch unpacked.

        Args:
            forward: The call of the model.
            loss: Lines that compute `loss` from `out`.
            results: Names that the step returns.
            dims: Names of the batch's members with their batch dims.
        """
        before, after = SCHEDULES[self.schedule]
        if self.optimizer == "none" and self.schedule != "buffer":
            before = after = ()
        zero = "optimizer.zero_grad({})" if self.optimizer != "none" else "model.zero_grad({})"
        zero = zero.format("set_to_none=False" if self.zero == "zeros" else "")
        lines = [*before, *([zero] if self.zero in ("before", "zeros") else [])]
        once = [f"out = {forward}", *loss]
        if self.schedule == "buffer":
            once.append("loss = loss * 0.5**model.passed")
        flipped = forward.replace("(x", f"(x.flip({dims['x']})")
        named = {"loss": "loss", "both": "(loss + aux)", "aux": "aux"}
        if self.accumulate > 1:
            named = {key: f"({text} / {self.accumulate})" for key, text in named.items()}
        once += [line.format(other=flipped, **named) for line in SECOND_LOSSES[self.second]]
        lines += [self._loop(dims), indented(once, 4)] if self.accumulate > 1 else once
        names = [*results, *(["aux"] if self.second != "none" else [])]
        names += ["norm"] if any("norm =" in line for line in CLIPS[self.clip]) else []
        lines += [*CLIPS[self.clip], *self._update(), *after]
        lines += [zero] if self.zero == "after" else []
        return [*lines, f"return {{{', '.join(f'{name!r}: {name}' for name in names)}}}"]

    def _loop(self, dims: dict[str, int | None]) -> str:
        """Return the head of the loop of accumulation."""
        if not self.micro:
            return f"for _ in range({self.accumulate}):"
        split = {name: dim for name, dim in dims.items() if dim is not None}
        chunks = [f"{name}.chunk({self.accumulate}, {dim})" for name, dim in split.items()]
        if len(chunks) == 1:
            return f"for x in {chunks[0]}:"
        return f"for {', '.join(split)} in zip({', '.join(chunks)}):"

    def _update(self) -> list[str]:
        if self.optimizer != "none":
            return ["optimizer.step()"]
        return [
            "with torch.no_grad():",
            "    for p in model.parameters():",
            "        if p.grad is not None:",
            "            p.sub_(0.1 * p.grad)",
        ]
