"""When a decoder layer captures what it was handed a collector for: before its attention, or not known."""

import ast
from collections.abc import Iterator

from class_source import Class, Unreadable

# parameters of what prepares attention; 0.5.21 says capture_output there (layers/layer_boundary/stage.py)
_HANDS_ON = ("capture", "capture_gathered", "capture_output", "captured_last_layer_outputs")
_PARTS = ("self_attn", "attn", "attention", "linear_attn", "mamba", "mixer", "mlp", "feed_forward", "block_sparse_moe",
          "conv", "experts")  # fmt: skip


def check_layers(core: Class, name: str) -> None:
    """Every layer of ``core`` that takes a collector as ``name`` captures its own input. Raises Unreadable."""
    takers = [one for one in _layer_classes(core) if _takes(one, name)]
    if not takers:
        raise Unreadable(f"{core.file}: no layer of {core.name} takes {name}")
    for one in takers:
        _check_layer(one, name)


def _layer_classes(core: Class) -> list[Class]:
    """Every class that the constructors of the core name, or that a table of layer types they use names."""
    found: dict[str, Class] = {}
    for one in core.line_of():
        if "__init__" not in one.own_methods:
            continue
        for name in _names(one.own_methods["__init__"], one, core):
            kind = one.module.class_named(name)
            if kind is not None:
                found[f"{kind.file} {kind.name}"] = kind
    return list(found.values())


def _names(node: ast.AST, one: Class, core: Class) -> Iterator[str]:
    """Names in a constructor, and in the tables that it looks layer types up in."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
            yield from _tabled(part.id, one)
        elif isinstance(part, ast.Attribute) and (kept := core.attribute(part.attr)) is not None:
            for inner in ast.walk(kept.expr):
                if isinstance(inner, ast.Name):
                    yield from _tabled(inner.id, kept.owner)


def _tabled(name: str, one: Class) -> Iterator[str]:
    for table in one.module.tree.body:
        if isinstance(table, ast.Assign) and ast.unparse(table.targets[0]) == name:
            yield from (inner.id for inner in ast.walk(table.value) if isinstance(inner, ast.Name))


def _takes(one: Class, name: str) -> bool:
    forward = one.method("forward")
    return forward is not None and bool(_uses(forward.node, name))


def _uses(forward: ast.FunctionDef, name: str) -> list[ast.expr]:
    """Where a layer's forward reads this parameter, or takes it out of its keywords."""
    named = any(arg.arg == name for arg in [*forward.args.args, *forward.args.kwonlyargs])
    found: list[ast.expr] = []
    for node in ast.walk(forward):
        if named and isinstance(node, ast.Name) and node.id == name:
            found.append(node)
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "kwargs.get"
            and ast.unparse(node.args[0]) == repr(name)
        ):
            found.append(node)
    return found


def _check_layer(one: Class, name: str) -> None:
    """The layer hands the collector to what prepares its attention, or appends its input, before any part runs."""
    method = one.method("forward")
    assert method is not None
    parents = {child: node for node in ast.walk(method.node) for child in ast.iter_child_nodes(node)}
    for use in _uses(method.node, name):
        parent = parents[use]
        handed = isinstance(parent, ast.keyword) and parent.arg in _HANDS_ON
        tested = isinstance(parent, ast.Compare) and ast.unparse(parent) == f"{name} is not None"
        appended = isinstance(parent, ast.Attribute) and ast.unparse(parents[parent]) == f"{name}.append(hidden_states)"
        if not (handed or tested or appended) or _comes_late(method.node, use):
            line = getattr(use, "lineno", 0)
            raise Unreadable(f"{method.owner.file}:{line} {one.name} does {ast.unparse(parent)[:60]}")


def _comes_late(forward: ast.FunctionDef, use: ast.AST) -> bool:
    """Whether a part of the layer (attention, MLP) has run before."""
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_part = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
            if is_part and node.func.attr in _PARTS and node.lineno < getattr(use, "lineno", 0):
                return True
    return False
