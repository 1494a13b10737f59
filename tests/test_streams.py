"""Color and movement are two questions, each with its own order of answers."""

import io

import pytest

from spmd_verify.streams import animates, printable, wants_color


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "environ", "on_terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": ""}, False, False),
        ("auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
        ("auto", {"CI": "true"}, True, True),
    ],
)
def test_the_flag_goes_over_the_environment_over_the_terminal(
    choice: str, environ: dict[str, str], on_terminal: bool, expected: bool
) -> None:
    stream = Terminal() if on_terminal else io.StringIO()

    assert wants_color(choice, stream, environ) is expected


@pytest.mark.parametrize(
    ("environ", "on_terminal", "expected"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, True),
        ({"CI": "true"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, False),
    ],
)
def test_nothing_moves_but_on_a_terminal_without_ci(
    environ: dict[str, str], on_terminal: bool, expected: bool
) -> None:
    assert animates(Terminal() if on_terminal else io.StringIO(), environ) is expected


def test_a_character_that_a_stream_lacks_is_written_as_its_number() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    assert printable("層 ok", stream) == "\\u5c64 ok"
    assert printable("層", io.StringIO()) == "層"
