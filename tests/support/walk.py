"""Count what a training run passes through: functions, files and their code tokens.

    python tests/support/walk.py --config configs/digits.yaml --steps 3 --epochs null --run_dir DIR

Runs `jaxdp train` with these arguments in this process, under a profiler that notes every function
of the package that is called, and prints JSON: `run`, the whole run in all threads; `update`, what
the main thread calls while the first update is traced and run. A function counts with its whole
source, once; functions inside it, lambdas and comprehensions count as part of it. JAX's way to
compile an update is wrapped, to know when one begins: `jit` and `pmap` of a function "update". The
loop reads the batches itself, as it does where a read is short: on a busy machine a thread would
take over after two long ones, and the same run would pass through more.
"""

import ast
import contextlib
import json
import math
import pathlib
import sys
import threading

import jax

from size import code_tokens, docstring

ROOT = pathlib.Path(__file__).parents[2] / "jaxdp"


class Watch:
    """Notes (file, first line) of every call into the package; `updating` is on while the program
    of an update is called."""

    def __init__(self):
        self.called, self.in_update, self.updating = set(), set(), False

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        self.called.add((code.co_filename, code.co_firstlineno))
        if self.updating and threading.current_thread() is threading.main_thread():
            self.in_update.add((code.co_filename, code.co_firstlineno))


class Program:
    """A compiled function that tells the watch when it is called or lowered."""

    def __init__(self, inner, watch):
        self.inner, self.watch = inner, watch

    def __call__(self, *args, **kwargs):
        return self.watched(self.inner, *args, **kwargs)

    def lower(self, *args, **kwargs):
        return self.watched(self.inner.lower, *args, **kwargs)

    def watched(self, f, *args, **kwargs):
        self.watch.updating = True
        try:
            return f(*args, **kwargs)
        finally:
            self.watch.updating = False

    def __getattr__(self, name):
        return getattr(self.inner, name)


def watched(compiler, watch):
    def compile_(*args, **kwargs):
        compiled = compiler(*args, **kwargs)
        is_update = getattr(args[0] if args else None, "__name__", "") == "update"
        return Program(compiled, watch) if is_update else compiled

    return compile_


def outer_functions(file):
    """(lines, name, source without docstrings) of the functions that are not inside another one."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                lines = range(first, child.end_lineno + 1)
                found.append((lines, inside + child.name, without_docstrings(child)))
            else:
                visit(child, f"{child.name}." if isinstance(child, ast.ClassDef) else inside)

    visit(ast.parse(pathlib.Path(file).read_text()), "")
    return found


def without_docstrings(function):
    for node in ast.walk(function):
        if docstring(node) is not None:
            node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
    return ast.unparse(function)


def row(places):
    functions = {}
    for file in {file for file, _ in places}:
        table = outer_functions(file)
        for line in (line for other, line in places if other == file):
            for lines, name, source in table:
                if line in lines:
                    functions[file, name, lines.start] = source
    return {
        "functions": len(functions),
        "files": len({file for file, *_ in functions}),
        "tokens": sum(map(code_tokens, functions.values())),
    }


def main(argv):
    watch = Watch()
    jax.jit, jax.pmap = watched(jax.jit, watch), watched(jax.pmap, watch)
    from jaxdp.__main__ import command
    from jaxdp.data import prefetch

    prefetch.SHORT_S = math.inf
    sys.argv = ["jaxdp", "train", *argv]
    threading.setprofile(watch)
    sys.setprofile(watch)
    with contextlib.suppress(SystemExit):
        command()
    sys.setprofile(None)
    threading.setprofile(None)
    print(json.dumps({"run": row(watch.called), "update": row(watch.in_update)}))


if __name__ == "__main__":
    main(sys.argv[1:])
