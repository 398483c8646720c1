"""Imports: a library finds libraries, whatever modules lie in the user's folder.

Python looks first in the folder of the script, or in the working directory. A module there that has
the name of a library (`humanize.py`, `secrets.py`) hides it from all others, and some libraries are
imported late: by the first save, in a worker, in a thread. So an import in the code of a library
looks last in these folders (`LibrariesFirst`), and `check` finds what is hidden all the same before
a run trains.

This module is imported before any other one of the package, so it needs only modules that Python's
start imports."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_MACHINERY = {"importlib", "_frozen_importlib", "_frozen_importlib_external"}
_IN_ANY = {"__init__.py", "__pycache__"}
_checked = set[
    tuple[str, ...]
]()  # the working directories, with the path, in which `check` found nothing


class LibrariesFirst:
    """A finder that lets the code of libraries and of jaxdp find modules outside of the user's
    folders first.
    """

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if path is not None or _imports_for_user(sys._getframe(1)):
            return None
        folders = users_folders()
        finder = _path_finder()
        spec = finder.find_spec(
            name, [x for x in sys.path if x and os.path.realpath(x) not in folders]
        )
        if spec is None and _is_statement(sys._getframe(1)) and finder.find_spec(name) is not None:
            raise ModuleNotFoundError(f"No module named {name!r} among the libraries", name=name)
        return spec


def install() -> None:
    """Add the finder, ahead of the one that looks in `sys.path`."""
    if LibrariesFirst not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(_path_finder()), LibrariesFirst)


def for_user(call: "Callable[..., Any]", *args: "Any") -> "Any":
    """Call a function that imports modules which the user names: his folders come first, as for a
    script.
    """
    return call(*args)


def _imports_for_user(frame: "Any") -> bool:
    """Return whether the code that imports is the user's."""
    frame = _importer(frame)
    if frame is None or frame.f_code is for_user.__code__:
        return True
    file = frame.f_code.co_filename
    return not (file.startswith((PACKAGE, "<frozen")) or is_installed(file))


def _importer(frame: "Any") -> "Any":
    """Return the frame of the code that imports."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _MACHINERY:
        frame = frame.f_back
    return frame


def _is_statement(frame: "Any") -> bool:
    """Return whether an `import` statement imports, which in a library means a library, and not a
    call as of pickle.

    Libraries try to import others, which need not be installed; the user's may have their names.
    """
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _STATEMENT


def is_installed(path: str) -> bool:
    """Return whether a file or a folder is of Python or of an installed package."""
    return f"{path}{os.sep}".startswith(STANDARD) or bool(
        {"site-packages", "dist-packages"} & {*path.split(os.sep)}
    )


def users_folders() -> set[str]:
    """Return the folders that Python, or jaxdp, adds to the path for the user: of the script, and
    the current one.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [_START, current_folder(), os.path.dirname(os.path.abspath(script)) if script else ""]
    return {os.path.realpath(folder) for folder in folders if folder}


def current_folder() -> str:
    """Return the working directory, "" if it was removed."""
    return os.getcwd() if os.path.isdir(".") else ""


def for_module() -> dict[str, str]:
    """Return the environment of a `python -P -m jaxdp.MODULE`, which does not look in the working
    directory.
    """
    path = [os.path.dirname(os.path.dirname(PACKAGE)), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def hiding() -> dict[str, str]:
    """Return {name: file} of modules in the user's part of the path that have the name of a
    library.
    """
    found: dict[str, str] = {}
    libraries = [entry for entry in sys.path if is_installed(entry)]
    for entry in dict.fromkeys(entry or "." for entry in sys.path if not is_installed(entry)):
        for child in os.scandir(entry) if os.path.isdir(entry) else ():
            name, ending = os.path.splitext(child.name)
            file = os.path.join(child.path, "__init__.py") if not ending else child.path
            if (
                ending not in ("", ".py")
                or not name.isidentifier()
                or name in found
                or not os.path.isfile(file)
            ):
                continue
            spec = _path_finder().find_spec(name, libraries)
            if (name in sys.stdlib_module_names or spec is not None) and not _is_copy(file, spec):
                found[name] = os.path.abspath(file)
    return found


def _is_copy(file: str, spec: "Any") -> bool:
    """Return whether a package is another version of a library, as in a checkout of its repository."""
    folders = getattr(spec, "submodule_search_locations", None) or ()
    inside = {name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
    return os.path.basename(file) == "__init__.py" and bool(
        inside & {*os.listdir(os.path.dirname(file))} - _IN_ANY
    )


def is_module_of(module: "Any", file: str) -> bool:
    """Return whether a module was imported from a file."""
    return os.path.realpath(getattr(module, "__file__", None) or "") == os.path.realpath(file)


def check(import_late: "Callable[[], Any]") -> str:
    """Return a message if a module of the user's hides a library that jaxdp or another library
    uses, or "".

    import_late: imports what a run needs later; called only if there is a module that may hide some
    of it."""
    state = current_folder(), *sys.path
    names = {} if state in _checked else hiding()
    problem = _hidden(names, import_late) if names else ""
    if not problem:
        _checked.add(state)
    return problem


def _hidden(names: dict[str, str], import_late: "Callable[[], Any]") -> str:
    """Return a message if one of these modules of the user's, {name: file}, hides a library that is
    used, or ""."""
    reason = ""
    try:
        import_late()
    except Exception as error:
        reason = f" ({type(error).__name__}: {' '.join(str(error).split())})"
    users = {
        name: file for name, file in names.items() if is_module_of(sys.modules.get(name), file)
    }
    for name, file in users.items():
        module = sys.modules[name]
        others = [
            m for m in [*sys.modules.values()] if is_installed(getattr(m, "__file__", None) or "")
        ]
        others += [m for key, m in [*sys.modules.items()] if key.startswith("jaxdp.")]
        if reason or any(
            value is module
            for other in others
            for value in [*getattr(other, "__dict__", {}).values()]
        ):
            return f"{file} hides the library {name!r}, which a run needs{reason}; rename this file"
    if reason:
        return (
            f"{', '.join(names.values())}: a library cannot be imported{reason}; rename these files"
        )
    return ""


def _path_finder() -> "Any":
    return next(
        finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"
    )


_START, _STATEMENT = current_folder(), -1
install()

import opcode  # noqa: E402

_STATEMENT = opcode.opmap["IMPORT_NAME"]
