"""Cases are found by the names of their hooks, and every missing part has its error."""

from collections.abc import Callable

import pytest

from spmd_verify.cases.case import LoadedCase, load_case
from spmd_verify.errors import CaseError

CaseWriter = Callable[..., str]

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)
"""
INPUTS = """
def get_inputs():
    return [torch.randn(8, 4)]
"""


def _refused(address: str) -> CaseError:
    """Load and build a case, and return why that is refused."""
    with pytest.raises(CaseError) as caught:
        load_case(address).build_model()
    assert caught.value.exit_code == 2
    return caught.value


def test_a_class_and_get_inputs_are_enough(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL + INPUTS))

    assert type(case.build_model()).__name__ == "Model"
    assert case.discovered["model"].startswith("class Model, line ")
    assert case.discovered["optimizer"] == "default: AdamW(lr=1e-3)"


def test_the_only_module_class_may_have_any_name(write_case: CaseWriter) -> None:
    case = load_case(write_case(MODEL.replace("Model", "Net") + INPUTS))

    assert type(case.build_model()).__name__ == "Net"


def test_model_wins_over_other_module_classes(write_case: CaseWriter) -> None:
    path = write_case(MODEL.replace("Model", "Part") + MODEL + INPUTS)

    assert type(load_case(path).build_model()).__name__ == "Model"
    assert type(load_case(f"{path}:Part").build_model()).__name__ == "Part"


def test_get_model_stands_instead_of_a_class(write_case: CaseWriter) -> None:
    path = write_case("def get_model():\n    return nn.Linear(4, 3)\n" + INPUTS)

    assert isinstance(load_case(path).build_model().weight.shape[0], int)


def test_a_function_after_the_colon_makes_the_model(write_case: CaseWriter) -> None:
    path = write_case("def make():\n    return nn.Linear(4, 3)\n" + INPUTS)

    assert type(load_case(f"{path}:make").build_model()).__name__ == "Linear"


def test_a_dotted_module_is_imported(
    write_case: CaseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_case(MODEL + INPUTS, name="dotted_case_module.py")
    monkeypatch.chdir(path.rpartition("/")[0])
    monkeypatch.syspath_prepend(path.rpartition("/")[0])

    case = load_case("dotted_case_module:Model")

    assert type(case.build_model()).__name__ == "Model"


def test_explicit_cases_are_named_and_filled_from_the_hooks(write_case: CaseWriter) -> None:
    path = write_case(
        MODEL + INPUTS + "from spmd_verify import Case\n"
        "CASES = [Case(name='plain'), Case(name='wide', inputs=[torch.zeros(2, 4)])]\n"
    )

    assert load_case(f"{path}::plain").batch_size == 8
    assert load_case(f"{path}::wide").batch_size == 2
    assert _refused(path).slug == "several-cases"
    assert "did you mean 'wide'" in str(_refused(f"{path}::wid"))


@pytest.mark.parametrize(
    "definition",
    [
        "CASE = Case(name='a', model=Model)",
        "CASES = {'a': Case(model=Model)}",
        "def cases():\n    yield Case(name='a', model=Model)",
    ],
)
def test_case_cases_and_the_function_are_alike(write_case: CaseWriter, definition: str) -> None:
    path = write_case(MODEL + INPUTS + f"from spmd_verify import Case\n{definition}\n")

    for address in (path, f"{path}::a"):
        assert load_case(address).discovered["model"] == "field of Case 'a'"


def test_user_styles_are_found_with_their_hooks(write_case: CaseWriter) -> None:
    case: LoadedCase = load_case(
        write_case(
            MODEL
            + INPUTS
            + """
def parallelize(model, mesh): ...
def parallelize_mine(model, mesh): ...
def step_mine(model, optimizer, batch, mesh): ...
def mesh_mine(): ...
def setup_other(model, mesh): ...
def parallelize_block(block, mesh, plan): ...
def setup_logging(): ...
def step_size(): ...
"""
        )
    )

    assert case.user_styles == ("user", "mine", "other")
    mine = case.hooks.styles["mine"]
    assert (mine.step is not None, mine.mesh is not None, mine.setup) == (True, True, None)
    assert case.discovered["styles"] == "user, mine, other"


def test_a_user_style_with_a_built_in_name_is_refused(write_case: CaseWriter) -> None:
    text = "def parallelize_ddp(model, mesh): ...\n"

    assert _refused(write_case(MODEL + INPUTS + text)).slug == "style-name-taken"


@pytest.mark.parametrize(
    ("text", "slug", "says"),
    [
        ("x = 1\n" + INPUTS, "no-module", "Add one of them"),
        (
            MODEL.replace("Model", "A") + MODEL.replace("Model", "B") + INPUTS,
            "several-modules",
            "Got A, B. Choose one:",
        ),
        (MODEL, "no-inputs", "forward takes (x)"),
        (
            MODEL.replace("__init__(self)", "__init__(self, width, *, depth)") + INPUTS,
            "missing-constructor-arguments",
            "Missing width, depth. Add get_init_inputs()",
        ),
        (MODEL.replace("4, 3", "4, missing") + INPUTS, "constructor-raised", "NameError"),
        ("def get_model():\n    return 3\n" + INPUTS, "not-a-module", "Got int"),
        ("1 / 0\n", "file-raised", "ZeroDivisionError"),
        ("import not_there_at_all\n", "import-error", "pip install not-there-at-all"),
        ("import cv2.missing\n", "import-error", "pip install opencv-python"),
        ("from . import sibling\n", "import-error", "package.module:Model"),
        (
            MODEL.replace("nn.Linear(4, 3)", "nn.Linear(4, 3).requires_grad_(False)") + INPUTS,
            "nothing-trainable",
            "No parameter requires grad",
        ),
        (
            MODEL.replace("nn.Linear(4, 3)", "nn.Embedding(4, 3, sparse=True)") + INPUTS,
            "sparse-gradient",
            "'fc.weight'",
        ),
    ],
)
def test_a_missing_part_has_the_smallest_fix(
    write_case: CaseWriter, text: str, slug: str, says: str
) -> None:
    error = _refused(write_case(text))

    assert error.slug == slug
    assert says in str(error)


def test_a_syntax_error_shows_its_line(write_case: CaseWriter) -> None:
    error = _refused(write_case("def get_inputs(:\n    pass\n"))

    assert error.slug == "syntax-error"
    assert "line 4" in str(error)
    assert "def get_inputs(:" in error.detail


def test_a_traceback_begins_in_the_users_file(write_case: CaseWriter) -> None:
    path = write_case(MODEL + INPUTS + "def fail():\n    raise KeyError('deep')\nfail()\n")

    detail = _refused(path).detail

    assert "spmd_verify" not in detail.replace(path, "")
    assert detail.splitlines()[1].strip().startswith(f'File "{path}"')
    assert detail.splitlines()[-1] == "KeyError: 'deep'"


def test_a_relative_path_gives_the_same_traceback(
    write_case: CaseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_case("def fail():\n    raise KeyError('deep')\nfail()\n")
    monkeypatch.chdir(path.rpartition("/")[0])

    lines = _refused("model.py").detail.splitlines()

    assert lines[1].strip() == f'File "{path}", line 6, in <module>'


@pytest.mark.parametrize("attribute", ["Nett", "built"])
def test_the_attribute_must_be_a_class_or_function(write_case: CaseWriter, attribute: str) -> None:
    path = write_case(MODEL + INPUTS + "built = Model()\n")

    assert _refused(f"{path}:{attribute}").slug == "no-such-attribute"
