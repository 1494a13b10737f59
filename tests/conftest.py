"""Shared set-up: one thread, no network, small case files on disk."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranked import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# No test reads or writes the user's own cache; commands that tests start inherit this.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="spmd-verify-test-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def write_case(tmp_path: Path) -> Callable[..., str]:
    """Write a case file and return its path.

    The text is put below the usual imports; `name` chooses the file's name.
    """

    def write(text: str, *, name: str = "model.py") -> str:
        path = tmp_path / name
        path.write_text(f"import torch\nfrom torch import nn\n\n{text}")
        return str(path)

    return write


@pytest.fixture
def root() -> Path:
    """Return the top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Call a function on real ranks: `on_ranks(function, *args, num_ranks=2)`."""
    ranks = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield ranks
    ranks.stop()


# Tables of like cases, and captures by the dozen: a minute each and more. `make test-fast` runs
# every sixteenth test of them.
TABLES = (
    "test_constructs_",
    "test_optimizers",
    "test_hf_engine",
    "test_judge_acceptance",
    "test_exact",
    "test_adversarial",
    "test_capture_",
    "test_packed",
    "test_memory",
    "test_behaviours_graphs",
    "test_drawn_models",
)
KEPT = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but a sample of the large tables slow."""
    tables = [item for item in items if item.path.name.startswith(TABLES)]
    for number, item in enumerate(tables):
        if number % KEPT:
            item.add_marker(pytest.mark.slow)
