"""Settings from pyproject.toml and the environment."""

from pathlib import Path

import pytest

from spmd_verify.config import load
from spmd_verify.errors import UsageError


def _write(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_the_environment_goes_over_the_file(tmp_path: Path) -> None:
    folder = _write(tmp_path, "[tool.spmd-verify]\nsteps = 5\nmesh = 4\nstyles = ['replicate']\n")
    below = folder / "a" / "b"
    below.mkdir(parents=True)

    settings = load(below, {"SPMD_VERIFY_STEPS": "2", "SPMD_VERIFY_MAX_RANKS": "8", "HOME": "/"})

    assert settings == {"steps": 2, "mesh": "4", "styles": ("replicate",), "max-ranks": 8}


def test_lists_and_truth_are_read_from_text(tmp_path: Path) -> None:
    settings = load(tmp_path, {"SPMD_VERIFY_STYLES": "a, b", "SPMD_VERIFY_STRICT": "yes"})

    assert settings == {"styles": ("a", "b"), "strict": True}


def test_a_file_without_our_table_says_nothing(tmp_path: Path) -> None:
    assert load(_write(tmp_path, "[project]\nname = 'x'\n"), {}) == {}


@pytest.mark.parametrize(
    ("text", "slug", "says"),
    [
        ("[tool.spmd-verify]\nstep = 5\n", "unknown-setting", "did you mean 'steps'"),
        ("[tool.spmd-verify]\nsteps = 'x'\n", "bad-setting", "steps = 'x'"),
        ("[tool.spmd-verify]\nstyles = 3\n", "bad-setting", "a list of strings"),
        ("[tool.spmd-verify]\nstrict = 'maybe'\n", "bad-setting", "true or false"),
        ("[tool.spmd-verify]\nmesh = true\n", "bad-setting", "a string"),
        ("[tool.spmd-verify\n", "config-unreadable", "pyproject.toml"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, slug: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load(_write(tmp_path, text), {})

    assert caught.value.slug == slug


def test_an_unknown_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'seed'") as caught:
        load(tmp_path, {"SPMD_VERIFY_SEEED": "1"})

    assert caught.value.slug == "unknown-setting"
