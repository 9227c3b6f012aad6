"""The user's script: finds it, runs it, and says at which of its lines an error began. Loads no torch."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import fusedcomm
from fusedcomm.tools.errors import ProbeError, ScriptError

SHAPE = "it must return (model, step), or (model, step, optimizer), where step(model) returns the loss"
_MODULE = "fusedcomm_probe_script"
_PACKAGE = str(Path(fusedcomm.__file__).parent)


def script_path(script: str) -> tuple[str, str]:
    """(path, name of the function) of `PATH` or `PATH:FUNCTION`. Without FUNCTION it is make().

    Raises:
        ProbeError: there is no such file, it is no Python file, or a colon has no function after it.
    """
    is_path = script.endswith(".py") or ":" not in script or Path(script).exists()
    path, name = (script, "make") if is_path else script.rpartition(":")[::2]
    wanted = "name a Python file, PATH.py or PATH.py:FUNCTION"
    if Path(path).is_dir():
        raise ProbeError(f"--script {script}: {path} is a folder: {wanted}")
    if not Path(path).is_file():
        raise ProbeError(f"--script {script}: there is no file {path or script}: {wanted}")
    if not path.endswith(".py"):
        raise ProbeError(f"--script {script}: {path} is not a Python file: its name must end in .py")
    if not name:
        raise ProbeError(f"--script {script}: no function is named after the colon: {wanted}")
    return path, name


def load(script: str) -> Callable[[], object]:
    """The function that `script` names, see :func:`script_path`.

    Raises:
        ProbeError: there is no such file or function, or running the file fails.
    """
    path, name = script_path(script)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    with naming_the_line(script):
        spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        found = ", ".join(functions[:6]) or "none"
        raise ProbeError(f"--script {script}: {path} has no function {name}(): {SHAPE}; functions there: {found}")
    return make


@contextlib.contextmanager
def naming_the_line(script: str | None) -> Iterator[None]:
    """Context in which the script's code runs. An error in it becomes a ScriptError that names its file and line.

    Args:
        script: None: there is no script, and errors stay as they are.
    """
    try:
        yield
    except ProbeError:
        raise
    except Exception as error:
        place = script and _place(error, script_path(script)[0])
        if not place:
            raise
        # Without a cause: contextlib would take one of a StopIteration for its own, and raise the StopIteration again.
        raise ScriptError(f"--script {script}: {place}") from None


def _place(error: Exception, path: str) -> str:
    """The place where an error began, and its text. The place is the last line beside the script that the error passed
    through, because the user can change that. Empty if there is none: then the script is not at fault."""
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return f"{error.filename}, line {error.lineno}: {line}\n  {type(error).__name__}: {error.msg}"
    folder = Path(path).resolve().parent
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(folder)
        and not any(name in frame.filename for name in (_PACKAGE, "site-packages"))
    ]
    if not own:
        return ""
    frame = own[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}\n  {type(error).__name__}: {error}"
