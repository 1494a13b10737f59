"""The text of a reproducing script, around what its `case` and `styles` write. Torch-free.

What is always the same stands here as a template of plain torch, so that it can be read as the
script it becomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template
from textwrap import indent
from typing import Final

_SCRIPT: Final = Template('''\
"""$title

$story
Written by spmd-verify repro; needs torch and $needs, nothing of spmd-verify.
Exit code: 1 the error is above LIMIT x NOISE, 0 it is not, 2 the script could not run.
"""

$imports

AXES = $axes  # the mesh: one gloo process per rank
SEED, STEP = $seed, $step  # steps 0 to STEP are run, the last one is compared
STAGE, NAME = $stage, $name
NOISE, LIMIT = $noise, $limit  # measured noise of the tensor, how much of it is allowed
SPLIT = $split  # per value of the batch: the dim that each axis divides
LAYOUT = $layout  # the dim of the tensor that each axis divides where ranks have parts
torch.set_num_threads(1)


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
$numpy_seed

def part(tensor, dims, at):
    """Return what the rank at a mesh coordinate has of a tensor; all of it at ()."""
    for size, index, dim in zip(AXES.values(), at, dims):
        tensor = tensor if dim is None else tensor.chunk(size, dim)[index]
    return tensor


def plain(value):  # of a DTensor the whole; collective
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value if value is None else torch.as_tensor(value).detach().clone()


$style


def train(case, model, optimizer, batch, mesh):
    """Run one training step, from zero_grad to optimizer.step; return the loss."""
$train


def run(mesh=None):
    """Train; return the tensor on one device, or what this rank of a mesh has of it."""
    seed(SEED)
    case = importlib.import_module($module)
    seed(SEED + 1)
${batches}    seed(SEED)
    model = $model
    owner = model.get_submodule($owner)
    at = () if mesh is None else tuple(mesh.get_coordinate())
    seed(SEED)
    one = (model, $optimizer) if mesh is None else None
    model, optimizer = one or parallel(case, model, mesh)
${again}    seen = []
${watch}    for step, batch in enumerate(data):
        leaves, spec = pytree.tree_flatten(batch)
        leaves = [$copied for leaf, dims in zip(leaves, SPLIT)]
        seen.clear()
        seed(SEED + 2 + step)
        loss = train(case, model, optimizer, pytree.tree_unflatten(leaves, spec), mesh)
    return plain($value)


def rank_main(rank, folder):
    """Be one rank; leave its value in a file."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=$ranks)
    mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    torch.save((run(mesh), mesh.get_coordinate()), os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def compare(title, value, expected):
    """Print a value beside what one device has; return the norm of the difference."""
    if value is None or value.shape != expected.shape:
        print(f"{title}: {value if value is None else tuple(value.shape)}, not {expected.shape}")
        return float("inf")
    x, y = value.to(torch.complex128).flatten(), expected.to(torch.complex128).flatten()
    off, factor = (x - y).abs(), float((x * y.conj()).sum().real / (y.abs() ** 2).sum())
    worst = int(off.nan_to_num(float("inf")).argmax())
    print(f"{title}: element {worst} is {x[worst].real:.9g}, one device has {y[worst].real:.9g}; "
          f"all: {factor:.6g} x one device, error {off.norm():.3g}")
    return float(off.norm())


def main():
    reference = run()
    print(f"{NAME} ({STAGE}, step {STEP}): shape {tuple(reference.shape)}")
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=$ranks)
        held = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range($ranks)]
$judge
    print(f"error {error:.3g}, noise {NOISE:.3g}; {LIMIT:g} x the noise is allowed")
    return 0 if error <= LIMIT * NOISE else 1


if __name__ == "__main__":
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))
    sys.exit(main())
''')
_JUDGE: Final = """\
errors = []
for rank, (value, at) in enumerate(held):
    is_part = value is not None and value.shape != reference.shape
    expected = part(reference, LAYOUT, at) if is_part else reference
    errors.append(compare(f"rank {rank}", value, expected))
error = float(torch.tensor(errors).norm() if is_part else max(errors))
"""
_JUDGE_LOSS: Final = """\
values = [value for value, _ in held if value is not None]
each = max(compare(f"rank {rank}", value, reference) for rank, value in enumerate(values))
total = torch.stack(values).sum(0)
mean = compare("mean over ranks", total / len(values), reference)
error = min(each, mean, compare("sum over ranks", total, reference))  # one of them is right
"""
_JUDGE_GATHERED: Final = """\
values = [value for value, _ in held]
if any(value.shape != reference.shape for value in values):
    values = [importlib.import_module($module).$gather(NAME, values)]
error = max(compare(f"value {rank}", value, reference) for rank, value in enumerate(values))
"""


def again(owner: str) -> str:
    """Return the lines that find a module again which a style has replaced."""
    return (
        "    if all(module is not owner for module in model.modules()):  # the style replaced it\n"
        f"        owner = model.get_submodule({owner!r})\n"
    )


def judge(stage: str, gather: str, module: str) -> str:
    """Return the lines that turn what ranks have into one error.

    Args:
        stage: The tensor's.
        gather: The file's hook that puts its parts together; empty for none.
        module: The case's, for that hook.
    """
    if stage == "loss":
        return _JUDGE_LOSS
    if gather:
        return Template(_JUDGE_GATHERED).substitute(gather=gather, module=repr(module))
    return _JUDGE


def script(parts: Mapping[str, str]) -> str:
    """Return the script from its parts; those of several lines are brought to their depth."""
    depths = {"batches": 1, "train": 1, "watch": 1, "judge": 1}
    placed = {
        name: indent(text, "    " * depths.get(name, 0)) if name in depths else text
        for name, text in parts.items()
    }
    kept_breaks = ("again", "batches", "numpy_seed", "watch")
    return _SCRIPT.substitute(
        {name: text if name in kept_breaks else text.rstrip("\n") for name, text in placed.items()}
    )
