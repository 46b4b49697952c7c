"""Objects by name: `package.module:Object` and `path/to/file.py:Object`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.errors import StrettoError, nearest


def load_object(spec: str, key: str) -> Any:
    """The object that `spec` names, its module imported; `key` is the configuration key for messages.

    Modules are looked for on `sys.path` and then in the current directory. A file is imported under its stem,
    with its own folder on `sys.path`, so that it finds the modules beside it.

    Raises:
        StrettoError: no such module, file or attribute, or the import itself failed.
    """
    where, separator, name = spec.rpartition(":")
    if not separator or not where or not name:
        raise StrettoError(f"{key}: {spec!r} is not of the form package.module:name or path/to/file.py:name")
    module = load_file(Path(where), key) if where.endswith(".py") else load_module(where, key)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise StrettoError(
                f"{key}: {where} has no {name!r}; {nearest(part, public) if public else 'it is empty'}"
            )
        found = getattr(found, part)
    return found


def load_module(name: str, key: str) -> ModuleType:
    """The module `name`, with the current directory as the last place to look."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            hint = f"looked on sys.path and in {here}"
            raise StrettoError(f"{key}: there is no module {error.name!r} ({hint})") from error
        raise StrettoError(f"{key}: importing {name} failed: {last_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise StrettoError(f"{key}: importing {name} failed: {last_line(error)}") from error


def load_file(path: Path, key: str) -> ModuleType:
    """The module in the file `path`, executed once in a process."""
    path = path.resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise StrettoError(
            f"{key}: there is no file {path}{'; ' + nearest(path.name, beside) if beside else ''}"
        )
    known = sys.modules.get(path.stem)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        raise StrettoError(
            f"{key}: {path} would hide the module {path.stem!r}, which is in use; rename the file"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise StrettoError(f"{key}: {path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise StrettoError(f"{key}: importing {path} failed: {last_line(error)}") from error
    return module


def last_line(error: BaseException) -> str:
    """The error in one line: its type, its message and the innermost place it came from."""
    said = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{said} ({error.filename}, line {error.lineno})"
    return f"{said} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else said
