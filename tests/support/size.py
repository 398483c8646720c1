"""Code tokens: what a reader has to take in, however it is laid out.

Comments, docstrings and layout are free. Only names, operators, numbers and strings of code count,
so neither packing lines nor leaving out explanations makes a package smaller.
"""

import ast
import io
import tokenize

FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
F_START, F_END = (getattr(tokenize, f"FSTRING_{x}", None) for x in ("START", "END"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring(node):
    """The docstring of a module, a class or a function, as a node; None without one."""
    body = getattr(node, "body", None)
    first = body[0] if isinstance(node, DOCUMENTED) and body else None
    constant = first.value if isinstance(first, ast.Expr) else None
    is_text = isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    return first if is_text else None


def code_tokens(source):
    found = [docstring(node) for node in ast.walk(ast.parse(source))]
    free = {(node.lineno, node.col_offset) for node in found if node is not None}
    count, inside = 0, 0  # of f-strings, which are several tokens since Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        inside -= token.type == F_END
        is_free = token.type in FREE or (token.type == tokenize.STRING and token.start in free)
        count += not inside and not is_free and token.type != F_END
        inside += token.type == F_START
    return count
