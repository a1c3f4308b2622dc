"""The classes of SGLang's model files as they stand in the source: bases, methods, and what an attribute is made of.

Nothing is imported and nothing runs. What cannot be read with certainty raises Unreadable, which says where.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_files import Package

_ABSENT = ("PPMissingLayer", "Identity")  # what stands where a pipeline rank or an encoder holds no model


class Unreadable(Exception):
    """Code that this script cannot read with certainty."""


@dataclass(frozen=True)
class Value:
    """An expression, and the class in whose source it stands; ``bound`` are the values of names in it."""

    expr: ast.expr
    owner: "Class"
    bound: Mapping[str, "Value"]


@dataclass(frozen=True)
class Method:
    """A function and the class in whose body it stands."""

    node: ast.FunctionDef
    owner: "Class"

    @property
    def where(self) -> str:
        return f"{self.owner.file}:{self.node.lineno}"


@dataclass(frozen=True)
class Class:
    """A class of one model file."""

    name: str
    file: str  # below sglang/srt/models/
    node: ast.ClassDef
    module: "Module"

    @property
    def own_methods(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.node.body if isinstance(node, ast.FunctionDef)}

    def line_of(self) -> list["Class"]:
        """It and its bases in the order in which Python looks for a method (C3); bases outside the package are left
        out, as torch and Transformers know nothing of capture."""
        bases = [base for node in self.node.bases if (base := self.module.class_of(node)) is not None]
        return [self, *_merge([base.line_of() for base in bases] + [bases])]

    def method(self, name: str) -> Method | None:
        """What ``self.name(...)`` runs. Raises Unreadable where attributes are made up on demand."""
        for one in self.line_of():
            if name in one.own_methods:
                return Method(one.own_methods[name], one)
            if any(_assigns(node, name) for node in one.node.body):
                raise Unreadable(f"{one.file}: {one.name}.{name} is assigned, not defined")
        if any("__getattr__" in one.own_methods for one in self.line_of()):
            raise Unreadable(f"{self.file}: {self.name} looks its methods up at run time")
        return None

    def method_above(self, below: "Class", name: str) -> Method | None:
        """What ``super().name(...)`` runs in a method of ``below``."""
        line = self.line_of()
        for one in line[line.index(below) + 1 :]:
            if name in one.own_methods:
                return Method(one.own_methods[name], one)
        return None

    def attribute(self, name: str) -> Value | None:
        """What the class's body, or the nearest base's, assigns to ``name``."""
        for one in self.line_of():
            for node in one.node.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and _assigns(node, name) and node.value is not None:
                    return Value(node.value, one, {})
        return None

    def made_of(self, attribute: str) -> list["Class"]:
        """The classes of which ``self.attribute`` may be, by the constructor. Raises Unreadable."""
        start = self.method("__init__")
        found = [] if start is None else self._made_in(start, attribute, {})
        return list(dict.fromkeys(found))

    def _made_in(self, init: Method, attribute: str, bound: Mapping[str, Value]) -> list["Class"]:
        """In this constructor, whose parameters have the values ``bound``; else in that which it calls by super()."""
        names = {**_defaults(init), **bound, **_locals(init, bound)}
        made, always = [], False
        for node in ast.walk(init.node):
            if isinstance(node, ast.Assign) and any(_is_self(target, attribute) for target in node.targets):
                made += self._classes_of(Value(node.value, init.owner, names))
                always = always or node in init.node.body
        above = None if always else _super_call(init)
        if above is not None and (parent := self.method_above(init.owner, "__init__")) is not None:
            made += self._made_in(parent, attribute, _arguments(above, parent, init.owner, names))
        return made

    def _classes_of(self, value: Value) -> list["Class"]:
        """Of the object that an expression makes."""
        expr = value.expr
        if isinstance(expr, ast.Constant) and expr.value is None:
            return []
        if isinstance(expr, ast.IfExp):
            return [one for part in (expr.body, expr.orelse)
                    for one in self._classes_of(Value(part, value.owner, value.bound))]  # fmt: skip
        if isinstance(expr, ast.Name) and expr.id in value.bound:
            return self._classes_of(value.bound[expr.id])
        if not isinstance(expr, ast.Call):
            raise Unreadable(f"{value.owner.file}:{expr.lineno} {ast.unparse(expr)[:60]}")
        if isinstance(expr.func, ast.Attribute) and _is_self(expr.func, expr.func.attr):
            kept = self.attribute(expr.func.attr)
            return self._called(kept) if kept is not None else self._returned_by(expr.func.attr, value)
        return self._called(Value(expr.func, value.owner, value.bound))

    def _called(self, value: Value) -> list["Class"]:
        """The classes that an expression in the place of a function stands for."""
        expr = value.expr
        if isinstance(expr, ast.Name) and expr.id in value.bound:
            return self._called(value.bound[expr.id])
        if isinstance(expr, ast.IfExp):
            return [one for part in (expr.body, expr.orelse)
                    for one in self._called(Value(part, value.owner, value.bound))]  # fmt: skip
        if isinstance(expr, ast.Name | ast.Attribute) and ast.unparse(expr).split(".")[-1] in _ABSENT:
            return []
        found = value.owner.module.class_of(expr)
        if found is None:
            raise Unreadable(f"{value.owner.file}:{expr.lineno} makes {ast.unparse(expr)[:60]}")
        return [found]

    def _returned_by(self, name: str, value: Value) -> list["Class"]:
        method = self.method(name)
        if method is None:
            raise Unreadable(f"{value.owner.file}:{value.expr.lineno} calls {name}, which is nowhere")
        names = _defaults(method)
        returns = [node.value for node in ast.walk(method.node) if isinstance(node, ast.Return)]
        return [one for expr in returns if expr is not None
                for one in self._classes_of(Value(expr, method.owner, names))]  # fmt: skip


class Module:
    """One model file."""

    def __init__(self, name: str, file: str, tree: ast.Module, package: "Package") -> None:
        self.name, self.file, self.tree, self.package = name, file, tree, package

    @cached_property
    def classes(self) -> dict[str, Class]:
        found: dict[str, Class] = {}
        for node in _unconditional(self.tree.body):
            if isinstance(node, ast.ClassDef):
                found[node.name] = Class(node.name, self.file, node, self)
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Name here: module and name there."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                base = self.name.split(".")[: -node.level] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        return found

    def class_of(self, expr: ast.expr) -> Class | None:
        """The class that a name stands for; None of one outside the package."""
        if isinstance(expr, ast.Name):
            return self.class_named(expr.id)
        if isinstance(expr, ast.Attribute) and isinstance(expr.value, ast.Name) and expr.value.id in self.imports:
            other = self.package.module(".".join(self.imports[expr.value.id]))
            return None if other is None else other.class_named(expr.attr)
        return None

    def class_named(self, name: str) -> Class | None:
        if name in self.classes:
            return self.classes[name]
        if name in self.imports:
            module, there = self.imports[name]
            other = self.package.module(module)
            return None if other is None or other is self else other.class_named(there)
        return None

    @cached_property
    def entries(self) -> list[str]:
        """The names of its EntryClass, which SGLang's registry takes as architectures."""
        names: list[str] = []
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == "EntryClass" for target in node.targets):
                parts = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                names = [part.id for part in parts if isinstance(part, ast.Name)]
                if len(names) != len(parts):
                    raise Unreadable(f"{self.file}:{node.lineno} EntryClass")
        mentions = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == "EntryClass"]
        if len(mentions) > 1:
            raise Unreadable(f"{self.file} sets EntryClass more than once")
        return names


def _merge(lines: list[list[Class]]) -> list[Class]:
    """The merge of C3."""
    merged: list[Class] = []
    while lines := [line for line in lines if line]:
        head = next((line[0] for line in lines if not any(line[0] in other[1:] for other in lines)), None)
        if head is None:
            raise Unreadable(f"{lines[0][0].file}: bases in no order")
        merged.append(head)
        lines = [[one for one in line if one is not head] for line in lines]
    return merged


def _unconditional(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those below if and try too; a later class of the same name wins, as in Python."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _unconditional([*node.body, *node.orelse])


def _assigns(node: ast.stmt, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets) and (
        not isinstance(node, ast.AnnAssign) or node.value is not None
    )


def _is_self(node: ast.expr, attribute: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.value, ast.Name)
            and node.value.id == "self")  # fmt: skip


def _defaults(method: Method) -> dict[str, Value]:
    args = method.node.args
    listed = [*args.posonlyargs, *args.args]
    pairs = [*zip(listed[len(listed) - len(args.defaults) :], args.defaults, strict=True),
             *zip(args.kwonlyargs, args.kw_defaults, strict=True)]  # fmt: skip
    return {arg.arg: Value(default, method.owner, {}) for arg, default in pairs if default is not None}


def _locals(method: Method, bound: Mapping[str, Value]) -> dict[str, Value]:
    """Names that the constructor assigns once, e.g. ``cls = A if x else B``."""
    assigned = [node for node in ast.walk(method.node)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]  # fmt: skip
    names = [node.targets[0].id for node in assigned if isinstance(node.targets[0], ast.Name)]
    return {name: Value(node.value, method.owner, bound) for name, node in zip(names, assigned, strict=True)
            if names.count(name) == 1}  # fmt: skip


def _super_call(method: Method) -> ast.Call | None:
    for node in ast.walk(method.node):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            return node
    return None


def _arguments(call: ast.Call, callee: Method, owner: Class, names: Mapping[str, Value]) -> dict[str, Value]:
    """The callee's parameters as this call binds them."""
    parameters = [arg.arg for arg in callee.node.args.args][1:]
    given = [*zip(parameters, call.args, strict=False),
             *((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)]  # fmt: skip
    return {name: Value(expr, owner, names) for name, expr in given}
