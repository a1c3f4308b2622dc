"""Where a decoder's forward captures its stream: before which layers, by list or by flag, and after the last one.

Every mention of ``layers_to_capture`` and ``_is_layer_to_capture`` has to be of a kind that is known here; any other
raises Unreadable.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capture_layer import check_layers
from class_source import Class, Method, Unreadable

_LIST, _FLAG = "layers_to_capture", "_is_layer_to_capture"
_LAST = ("self.end_layer", "len(self.layers)", "self.config.num_hidden_layers")


def handed_over(one: Class) -> bool:
    """Whether the class's forward takes captured states apart and gives them to the logits processor."""
    forward = capturing_forward(one)
    if forward is None:
        return False
    taken = {target.elts[-1].id for node in ast.walk(forward.node) if isinstance(node, ast.Assign)
             for target in node.targets
             if isinstance(target, ast.Tuple) and isinstance(target.elts[-1], ast.Name)}  # fmt: skip
    for node in ast.walk(forward.node):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.logits_processor":
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(arg, ast.Name) and arg.id in taken for arg in given):
                return True
    return False


@dataclass(frozen=True)
class Loop:
    """``tests``: list, flag, or both; ``last``: whether R[N] is captured too; ``packed``: into one buffer of as many
    columns as the list is long, or into a list of what came."""

    tests: frozenset[str]
    last: bool
    packed: bool
    where: str


def read_loop(core: Class) -> Loop:
    """Of the class that holds the layers. Raises Unreadable; of a forward that captures nothing ``tests`` is empty."""
    forward = capturing_forward(core)
    if forward is None:
        raise Unreadable(f"{core.file}: {core.name} has no forward")
    _refuse_helpers(core, forward)
    return _Forward(core, forward).read()


def capturing_forward(one: Class) -> Method | None:
    """Its forward; that of a base where its own only calls that one and never speaks of captured states."""
    forward = one.method("forward")
    while forward is not None and "super().forward(" in (text := ast.unparse(forward.node)):
        if any(word in text for word in (_LIST, _FLAG, "aux_hidden_states", "hidden_states =", "output.hidden_states")):
            raise Unreadable(f"{forward.where} changes what the base's forward returns")
        forward = one.method_above(forward.owner, "forward")
    return forward


def _refuse_helpers(core: Class, forward: Method) -> None:
    """A method that forward calls may capture as well."""
    called = {node.attr for node in ast.walk(forward.node) if isinstance(node, ast.Attribute)}
    for one in core.line_of():
        for name, node in one.own_methods.items():
            if name in called and name != "forward" and (_LIST in (text := ast.unparse(node)) or _FLAG in text):
                raise Unreadable(f"{one.file}:{node.lineno} {name} captures")


class _Forward:
    def __init__(self, core: Class, method: Method) -> None:
        self.core, self.method = core, method
        self.parents = {child: node for node in ast.walk(method.node) for child in ast.iter_child_nodes(node)}
        self.tests: set[str] = set()
        self.after_layers = False
        self.last = self.packed = self.embedding = False
        self.line = method.node.lineno

    def refuse(self, node: ast.AST) -> Unreadable:
        line = getattr(node, "lineno", self.method.node.lineno)
        return Unreadable(f"{self.method.owner.file}:{line} {ast.unparse(node).splitlines()[0][:70]}")

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def read(self) -> Loop:
        for node in ast.walk(self.method.node):
            if isinstance(node, ast.Attribute) and node.attr == _LIST:
                self._list(node)
            elif isinstance(node, ast.Constant) and node.value == _FLAG:
                self._in_loop("flag", self.parents[node])
            elif isinstance(node, ast.Attribute) and node.attr == _FLAG:
                self._in_loop("flag", node)
        if self.tests:
            self._returned()
        if self.after_layers and not self.embedding:
            raise Unreadable(
                f"{self.method.owner.file}:{self.line} captures what layers give, and never what the first takes"
            )
        return Loop(frozenset(self.tests), self.last, self.packed, f"{self.method.owner.file}:{self.line}")

    def _returned(self) -> None:
        """Every tuple that is returned ends in the collector, unless that is empty."""
        names = self.collectors()
        for node in ast.walk(self.method.node):
            if not isinstance(node, ast.Return) or not isinstance(node.value, ast.Tuple):
                continue
            last = ast.unparse(node.value.elts[-1]).removesuffix(".finalize()")
            empty = any(isinstance(one, ast.If) and ast.unparse(one.test) in {f"len({name}) == 0" for name in names}
                        for one in self.above(node))  # fmt: skip
            if last not in names and not empty:
                raise self.refuse(node)

    def collectors(self) -> set[str]:
        """Local names that hold what was captured."""
        kinds = ("[]", "AuxHiddenStateList()", "AuxHiddenStatePacker(")
        return {ast.unparse(target) for node in ast.walk(self.method.node)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                and ast.unparse(node.value).startswith(kinds)
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}  # fmt: skip

    def _list(self, node: ast.Attribute) -> None:
        parent = self.parents[node]
        if ast.unparse(node) != f"self.{_LIST}":
            raise self.refuse(node)
        if isinstance(parent, ast.Call) and ast.unparse(parent.func) == "len":
            call = self.parents[parent]
            if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("AuxHiddenStatePacker"):
                raise self.refuse(call)
            self.packed = True
        elif isinstance(parent, ast.UnaryOp):  # two batches at a time, only where nothing is captured
            if "can_run_tbo" not in ast.unparse(self.parents[parent]):
                raise self.refuse(parent)
        elif isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.In):
            self._membership(parent)
        else:
            raise self.refuse(parent)

    def _membership(self, test: ast.Compare) -> None:
        left = ast.unparse(test.left)
        if self._loop(test) is not None:
            self._in_loop("list", test)
        elif left == "self.start_layer":
            self._after(test)
            self.embedding = True
        elif left in _LAST or self._names_layers(left):
            self._after(test)
            self.last = True
        else:
            raise self.refuse(test)

    def _names_layers(self, name: str) -> bool:
        """Whether a local name stands for the number of layers."""
        values = [ast.unparse(node.value) for node in ast.walk(self.method.node)
                  if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]  # fmt: skip
        return bool(values) and all(value in _LAST for value in values)

    def _after(self, test: ast.AST) -> None:
        """Outside the loop: the stream is appended, or the final norm is told to."""
        parent = next(node for node in self.above(test) if isinstance(node, ast.If | ast.IfExp))
        text = ast.unparse(parent.body if isinstance(parent, ast.IfExp) else parent.body[0])
        if not (text.endswith((".capture", ".append")) or ".append(" in text):
            raise self.refuse(parent)

    def _loop(self, node: ast.AST) -> ast.For | None:
        """The innermost loop over layers around a node."""
        return next((one for one in self.above(node) if isinstance(one, ast.For)), None)

    def _in_loop(self, kind: str, test: ast.AST) -> None:
        loop = self._loop(test)
        if loop is None or any(isinstance(one, ast.For) for one in self.above(loop)) or not _over_layers(loop):
            raise self.refuse(test)
        after = kind == "list" and self._is_index(test, loop, " + 1")
        if kind == "list" and not after and not self._is_index(test, loop):
            raise self.refuse(test)
        choice = next(node for node in self.above(test) if isinstance(node, ast.If | ast.IfExp))
        if choice.test is not test:
            raise self.refuse(choice)
        if isinstance(choice, ast.If):
            self._appended(choice, after)
        elif after:
            raise self.refuse(choice)
        else:
            self._handed(choice)
        self.after_layers = self.after_layers or after
        self.last = self.last or after
        self.tests.add(kind)
        self.line = loop.lineno

    def _is_index(self, test: ast.AST, loop: ast.For, plus: str = "") -> bool:
        """Whether what is tested is the layer's number, or that plus one."""
        first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        name = ast.unparse(first)
        if not isinstance(test, ast.Compare) or ast.unparse(test.left) != name + plus:
            return False
        sliced = "self.start_layer:self.end_layer" in ast.unparse(loop.iter).replace(" ", "")
        moved = [ast.unparse(node) for node in loop.body
                 if isinstance(node, ast.Assign | ast.AugAssign)
                 and ast.unparse(node).startswith(f"{name} ")]  # fmt: skip
        shifts = ([f"{name} = {name} + self.start_layer"], [f"{name} += self.start_layer"])
        return moved in shifts if sliced else not moved

    def _appended(self, choice: ast.If, after: bool) -> None:
        """``if i in ...: aux.append(hidden_states)`` before the layer runs, or ``if i + 1 in ...`` after it."""
        if choice.orelse or not any(".append(" in ast.unparse(node) for node in choice.body):
            raise self.refuse(choice)
        bodies = (getattr(node, "body", []) for node in self.above(choice))
        body: list[ast.stmt] = next((one for one in bodies if isinstance(one, list) and choice in one), [])
        place = body.index(choice) if choice in body else 0
        runs = [_runs_a_layer(part) for part in (body[:place], choice.body, body[place + 1 :])]
        if runs != [after, False, not after]:
            raise self.refuse(choice)

    def _handed(self, choice: ast.IfExp) -> None:
        """``layer(..., capture_output=aux.capture if i in ... else None)``: the layer captures before its attention."""
        if ast.unparse(choice.orelse) != "None":
            raise self.refuse(choice)
        parent = self.parents[choice]
        name = ""
        if isinstance(parent, ast.keyword) and parent.arg:
            name = parent.arg
        elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            local = parent.targets[0].id
            names = {node.arg for node in ast.walk(self.method.node)
                     if isinstance(node, ast.keyword) and ast.unparse(node.value) == local}  # fmt: skip
            name = next(iter(names)) or "" if len(names) == 1 else ""
        if not name:
            raise self.refuse(choice)
        check_layers(self.core, name)


def _over_layers(loop: ast.For) -> bool:
    text = ast.unparse(loop.iter).replace(" ", "")
    return text in ("range(self.start_layer,self.end_layer)", "range(len(self.layers))", "enumerate(self.layers)",
                    "enumerate(self.layers[self.start_layer:self.end_layer])", "range(total_num_layers)",
                    "range(normal_start_layer,normal_end_layer)")  # fmt: skip


def _runs_a_layer(body: Sequence[ast.stmt]) -> bool:
    calls = ("layer", "layer.forward", "self.layers[i]", "self.layers[layer_idx]")
    return any(isinstance(part, ast.Call) and ast.unparse(part.func) in calls
               for node in body for part in ast.walk(node))  # fmt: skip
