"""What a model class's ``set_..._layers_to_capture`` does with layer ids, read from its source.

The method is followed statement by statement with symbols for values. A statement of another kind than those below
raises Unreadable: nothing is guessed.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from class_source import Class, Method, Unreadable

# a value: "ids", "none", "default", ("plus", value), ("if", condition, value, value), ("layers", where from)
Symbol = str | tuple[object, ...]
DEFAULT = "[2, N // 2, N - 3]"
_CONDITIONS = {"{ids} and {ids}[0] == 1": "first id is 1", "{ids} and max({ids}) == N": "largest id is N"}
_FLAG = "_is_layer_to_capture"
_NOT_LAST_RANK = re.compile(r"not [\w.()]*pp_group(\(\))?\.is_last_rank")


@dataclass
class Effects:
    """What a call leaves behind: where which list was set, which layers got a flag, and what was switched on."""

    lists: list[tuple[Class, Symbol]] = field(default_factory=list)
    flags: list[tuple[Class, str]] = field(default_factory=list)
    switched: list[Class] = field(default_factory=list)
    raised: str = ""


class Setter:
    """One class's method ``name``, called with ``ids`` as its only argument."""

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, one: Class, ids: Symbol) -> Effects:
        """Raises Unreadable."""
        effects = Effects()
        method = one.method(self.name)
        if method is None:
            raise Unreadable(f"{one.name} has no {self.name}")
        self._call(method, one, ids, effects)
        return effects

    def _call(self, method: Method, one: Class, ids: Symbol, effects: Effects) -> None:
        parameters = [arg.arg for arg in method.node.args.args]
        if len(parameters) != 2 or method.node.decorator_list:
            raise Unreadable(f"{method.where} {self.name} takes {', '.join(parameters)}")
        _Body(self, method, one, effects).run(method.node.body, {parameters[1]: ids})


class _Body:
    """The statements of one method, run with ``one`` as self."""

    def __init__(self, setter: Setter, method: Method, one: Class, effects: Effects) -> None:
        self.setter, self.method, self.one, self.effects = setter, method, one, effects

    def refuse(self, node: ast.AST) -> Unreadable:
        line = getattr(node, "lineno", self.method.node.lineno)
        return Unreadable(f"{self.method.owner.file}:{line} {ast.unparse(node).splitlines()[0][:70]}")

    def run(self, body: Sequence[ast.stmt], names: dict[str, Symbol]) -> None:
        for node in body:
            if self.effects.raised:
                return
            if isinstance(node, ast.If):
                self._branch(node, names)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value, names)
            elif isinstance(node, ast.For):
                self._flag(node)
            elif isinstance(node, ast.Raise):
                self.effects.raised = f"{self.method.owner.file}:{node.lineno}"
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._delegate(node.value, names)
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                raise self.refuse(node)

    def _branch(self, node: ast.If, names: dict[str, Symbol]) -> None:
        test = ast.unparse(node.test)
        if _NOT_LAST_RANK.fullmatch(test):
            if len(node.body) != 1 or not isinstance(node.body[0], ast.Return) or node.orelse:
                raise self.refuse(node)
            return  # a rank that does not end the pipeline captures nothing
        known = self._decided(node.test, names)
        if known is not None:
            self.run(node.body if known else node.orelse, names)
            return
        condition = _condition(test, names)
        if condition is None:
            raise self.refuse(node)
        self._both(node, condition, names)

    def _decided(self, test: ast.expr, names: Mapping[str, Symbol]) -> bool | None:
        """Of a test that the class and whether ids were given decide; None of any other."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
            parts = [self._decided(part, names) for part in test.values]
            return None if None in parts else any(parts)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            known = self._decided(test.operand, names)
            return None if known is None else not known
        if isinstance(test, ast.Compare) and ast.unparse(test.comparators[0]) == "None":
            same = isinstance(test.ops[0], ast.Is)
            if isinstance(test.left, ast.Name) and test.left.id in names:
                return (names[test.left.id] == "none") is same
            return not same if _path(test.left) else None  # a model that serves text holds its parts
        if isinstance(test, ast.Call) and ast.unparse(test.func) == "hasattr" and len(test.args) == 2:
            name = test.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and (path := _path(test.args[0])):
                return self._part(path, test).method(name.value) is not None
        return None

    def _both(self, node: ast.If, condition: str, names: dict[str, Symbol]) -> None:
        """Both branches set the same list; which of them runs, the ids decide."""
        before, results = list(self.effects.lists), []
        for body in (node.body, node.orelse):
            self.effects.lists = []
            self.run(body, names)
            if len(self.effects.lists) != 1:
                raise self.refuse(node)
            results.append(self.effects.lists[0])
        (owner, yes), (other, no) = results
        if owner != other:
            raise self.refuse(node)
        self.effects.lists = [*before, (owner, ("if", condition, yes, no))]

    def _assign(self, target: ast.expr, value: ast.expr, names: dict[str, Symbol]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = self._value(value, names)
            return
        path = _path(target)
        if path and path[-1] == "capture_aux_hidden_states" and ast.unparse(value) == "True":
            if len(path) == 1:
                self.effects.switched.append(self.one)
        elif path and path[-1] == "layers_to_capture":
            self.effects.lists.append((self._part(path[:-1], target), self._value(value, names)))
        else:
            raise self.refuse(target)

    def _delegate(self, call: ast.Call, names: Mapping[str, Symbol]) -> None:
        path = _path(call.func)
        if not path or path[-1] != self.setter.name or len(call.args) != 1 or call.keywords:
            raise self.refuse(call)
        part = self._part(path[:-1], call)
        method = part.method(self.setter.name)
        if method is None:
            raise self.refuse(call)
        self.setter._call(method, part, self._value(call.args[0], names), self.effects)

    def _flag(self, node: ast.For) -> None:
        """``for layer_id in self.layers_to_capture: setattr(self.layers[layer_id], flag, True)``, with or without a
        test that there is such a layer."""
        path, index = _path(node.iter), ast.unparse(node.target)
        body, checked = node.body, "unchecked"
        if path and path[-1] == "layers_to_capture" and isinstance(body[0], ast.If):
            layers = ".".join(["self", *path[:-1], "layers"])
            tests = (f"0 <= {index} < len({layers})", f"0 <= {index} and {index} < len({layers})")
            if ast.unparse(body[0].test) not in tests or body[0].orelse:
                raise self.refuse(node)
            body, checked = body[0].body, "checked"
        if not path or path[-1] != "layers_to_capture" or len(body) != 1:
            raise self.refuse(node)
        layer = f"{'.'.join(['self', *path[:-1], 'layers'])}[{index}]"
        if ast.unparse(body[0]) not in (f"setattr({layer}, '{_FLAG}', True)", f"{layer}.{_FLAG} = True"):
            raise self.refuse(node)
        self.effects.flags.append((self._part(path[:-1], node), checked))

    def _value(self, expr: ast.expr, names: Mapping[str, Symbol]) -> Symbol:
        text = ast.unparse(expr)
        if isinstance(expr, ast.Name) and expr.id in names:
            return names[expr.id]
        if isinstance(expr, ast.Call) and text.startswith(("list(", "set(")) and len(expr.args) == 1:
            return self._value(expr.args[0], names)
        if isinstance(expr, ast.ListComp | ast.SetComp) and len(expr.generators) == 1:
            loop, name = expr.generators[0], ast.unparse(expr.generators[0].target)
            if ast.unparse(expr.elt) == f"{name} + 1" and not loop.ifs:
                return ("plus", self._value(loop.iter, names))
        if isinstance(expr, ast.List) and self._spelled(expr, names) == DEFAULT:
            return "default"
        if text.endswith(".num_hidden_layers") or (text.startswith("len(self.") and text.endswith(".layers)")):
            return ("layers", text)
        if text == "self.config.text_config":
            return ("config", text)
        raise self.refuse(expr)

    def _spelled(self, expr: ast.expr, names: Mapping[str, Symbol]) -> str:
        """With N for every name that stands for the number of layers."""
        copy = ast.parse(ast.unparse(expr), mode="eval")
        for node in ast.walk(copy):
            if isinstance(node, ast.Name) and isinstance(names.get(node.id), tuple) and names[node.id][0] == "layers":
                node.id = "N"
        return ast.unparse(copy)

    def _part(self, path: Sequence[str], node: ast.AST) -> Class:
        """The class of ``self.a.b``."""
        part = self.one
        for name in path:
            made = part.made_of(name)
            if len(made) != 1:
                kinds = ", ".join(one.name for one in made) or "nothing"
                raise Unreadable(f"{part.file}: {part.name}.{name} may be of {kinds}")
            part = made[0]
        return part


def _condition(test: str, names: Mapping[str, Symbol]) -> str | None:
    """A test on given ids that is known by its text."""
    ids = [name for name, value in names.items() if value == "ids"]
    layers = [name for name, value in names.items() if isinstance(value, tuple) and value[0] == "layers"]
    for name in ids:
        for text, meaning in _CONDITIONS.items():
            for count in ("N", *layers):
                if test == text.format(ids=name).replace("== N", f"== {count}"):
                    return meaning
    return None


def _path(node: ast.expr) -> tuple[str, ...]:
    """``("model", "layers")`` of ``self.model.layers``; empty of anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ()
