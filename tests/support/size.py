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
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in FREE and not (token.type == tokenize.STRING and token.start in free)
        for token in tokens
    )
