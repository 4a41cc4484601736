"""Examples of docstrings as functions that torch.compile compiles."""

from __future__ import annotations

import ast
import doctest
import sys

import torch


def compile_examples(test: doctest.DocTest, backend: str) -> None:
    """Replace each example by the call of a compiled function with the same code, which stores globals."""
    torch._dynamo.reset()
    test.globs["show"] = _show
    for number, example in enumerate(test.examples):
        name = f"example_{number}"
        exec(compile(_function(name, example.source), test.name, "exec", dont_inherit=True), test.globs)
        test.globs[name] = torch.compile(test.globs[name], backend=backend)
        example.source = f"show({name}())\n"


def _show(values: list[object]) -> None:
    for value in values:
        sys.displayhook(value)


def _function(name: str, source: str) -> ast.Module:
    """Return the definition of a function that returns the values which an interactive session would show."""
    body = [_Shown().visit(statement) for statement in ast.parse(source).body]
    stored = sorted({name for statement in body for node in ast.walk(statement) for name in _names_bound(node)})
    module = ast.parse(f"def {name}():\n    shown = []\n    return shown")
    module.body[0].body[1:1] = [*([ast.Global(stored)] if stored else []), *body]  # type: ignore[attr-defined]
    return ast.fix_missing_locations(module)


class _Shown(ast.NodeTransformer):
    """Transformer that appends the values of expressions to the list that the function returns."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        append = ast.parse("shown.append(None)").body[0]
        append.value.args = [node.value]  # type: ignore[attr-defined]
        return append

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.Assign([node.target], node.value)  # a global has no annotation


def _names_bound(node: ast.AST) -> list[str]:
    """Return the names that a node of the syntax tree binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return []
