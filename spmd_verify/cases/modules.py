"""Import of case files: by path or dotted name, each failure with its smallest fix.

Torch-free itself; the user's file usually is not.
"""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from spmd_verify.cases.address import Address
from spmd_verify.errors import CaseError
from spmd_verify.user_code import UserCode, user_traceback

# Import name -> distribution name, where the two differ and people meet it.
_DISTRIBUTIONS: Final = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "torch_geometric": "torch-geometric",
}


def import_case_module(address: Address) -> ModuleType:
    """Import the module that an address names.

    A file is executed again at each call under its own module name, so that every load
    starts alike; its folder is put on `sys.path` for the modules beside it.

    Raises:
        CaseError: `syntax-error`, `import-error`, `file-raised`.
    """
    try:
        with UserCode("Import of the case", path=address.source, slug="file-raised"):
            if address.kind == "module":
                return _import_dotted(address.source)
            return _import_file(Path(address.source))
    except CaseError as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError):
            raise _syntax_error(cause, address.source) from cause
        if isinstance(cause, ImportError):
            raise _import_error(cause, address.source) from cause
        raise


def source_hash(address: Address, module: ModuleType) -> str:
    """Return the SHA-256 of the module's source, or of its address where it has no file."""
    path = getattr(module, "__file__", None)
    content = Path(path).read_bytes() if path else address.text.encode()
    return hashlib.sha256(content).hexdigest()


def _import_dotted(name: str) -> ModuleType:
    """Import a dotted module with the working folder on the path, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Execute a file as a module of its own."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"spmd_verify_case_{path.stem}_{digest}"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def _syntax_error(error: SyntaxError, path: str) -> CaseError:
    """Show the line Python could not read."""
    line = (error.text or "").rstrip()
    mark = " " * max((error.offset or 1) - 1, 0) + "^"
    return CaseError(
        f"The file is not valid Python: {error.filename or path}, line {error.lineno}. Got "
        f"{error.msg}. Correct this line",
        slug="syntax-error",
        detail=f"{line}\n{mark}" if line else "",
    )


def _import_error(error: ImportError, path: str) -> CaseError:
    """Say what to install."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if "relative import" in str(error):
        remedy = "Address it by its package instead: package.module:Model"
    elif missing:
        root = missing.partition(".")[0]
        remedy = f"Install it: pip install {_DISTRIBUTIONS.get(root, root.replace('_', '-'))}"
    else:
        remedy = "Check the version of the package it comes from"
    return CaseError(
        f"An import failed: {path}. Got {type(error).__name__}: {error}. {remedy}",
        slug="import-error",
        detail=user_traceback(error, path),
    )
