"""What an address means."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_verify.cases.address import Address, expand, parse
from spmd_verify.errors import UsageError

CaseWriter = Callable[..., str]


def test_the_forms_of_an_address(write_case: CaseWriter) -> None:
    path = write_case("x = 1")

    assert parse(path) == Address(path, "file", path)
    assert parse(f"{path}:Net") == Address(f"{path}:Net", "file", path, attribute="Net")
    assert parse(f"{path}::small") == Address(f"{path}::small", "file", path, case="small")
    assert parse("pkg.mod:make") == Address("pkg.mod:make", "module", "pkg.mod", attribute="make")
    assert parse("hf:mlm/x?a=1") == Address("hf:mlm/x?a=1", "hf", "mlm/x?a=1")


def test_a_missing_file_lists_what_is_there(write_case: CaseWriter) -> None:
    path = write_case("x = 1", name="model.py")

    with pytest.raises(UsageError, match="did you mean 'model.py'") as caught:
        parse(path.replace("model.py", "modle.py"))

    assert caught.value.slug == "no-such-file"


@pytest.mark.parametrize("ending", [":", "::"])
def test_an_address_that_ends_too_early_is_refused(write_case: CaseWriter, ending: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(write_case("x = 1") + ending)

    assert caught.value.slug == "bad-address"


def test_a_directory_gives_the_files_that_look_like_cases(
    write_case: CaseWriter, tmp_path: Path
) -> None:
    model = write_case("def get_inputs(): ...", name="b.py")
    explicit = write_case("CASE = None", name="a.py")
    broken = write_case("def get_inputs(:", name="c.py")
    write_case("def helper(): ...", name="d.py")
    write_case("def get_inputs(): ...", name="test_b.py")
    write_case("def get_inputs(): ...", name="_private.py")

    assert expand((str(tmp_path),)) == [explicit, model, broken]


def test_a_directory_without_a_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        expand((str(tmp_path),))

    assert caught.value.slug == "empty-directory"
