"""The names of a file's explicit cases, for programs that may not run the file themselves.

Runs the user's file: meant for a process of its own, as `shared_runs.case_names` starts it.
"""

import json

from spmd_verify.cases.address import parse
from spmd_verify.cases.discovery import explicit_cases
from spmd_verify.cases.modules import import_case_module
from spmd_verify.errors import SpmdVerifyError
from spmd_verify.seeding import seed_all
from spmd_verify.whole_file import write_whole


def write_names(target: str, path: str) -> str | None:
    """Write the names as JSON; return what went wrong, None for nothing.

    The user's file may print what it likes to stdout, so the names go into a file.
    """
    try:
        address = parse(target)
        seed_all(0)
        names = list(explicit_cases(import_case_module(address), address))
    except SpmdVerifyError as error:
        return str(error)
    write_whole(path, json.dumps(names).encode())
    return None
