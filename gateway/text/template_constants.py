"""Texts that a chat template composes from constants, found without running it.

Some templates never spell the tags that they teach: Hy3's has `'<tool_call{}>'.format(suffix)`, with the
suffix in a variable. Such tags are needed to recognise the model's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import jinja2.nodes as nodes

# Tags are short: this bounds a template that doubles a text in every line.
_MAX_CHARACTERS = 1000


def constant_texts(template: nodes.Template) -> Iterator[str]:
    """Yields the values of all variables and expressions of constant strings alone, in order."""
    known: dict[str, str] = {}
    for node in template.find_all((nodes.Assign, nodes.Add, nodes.Concat, nodes.Call)):
        if isinstance(node, nodes.Assign):
            value = _value(node.node, known)
            if isinstance(node.target, nodes.Name) and value is not None:
                known[node.target.name] = value
        else:
            value = _value(node, known)
        if value is not None:
            yield value


def _value(node: nodes.Node, known: dict[str, str]) -> str | None:
    """Returns the value of a `+`, a `~`, a variable or `'…{}…'.format(…)`; None: not a constant."""
    if isinstance(node, nodes.Const):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, nodes.Name):
        return known.get(node.name)
    if isinstance(node, (nodes.Add, nodes.Concat)):
        parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
        return _joined([_value(part, known) for part in parts])
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "format":
        form, values = _value(node.node.node, known), [_value(argument, known) for argument in node.args]
        if form is None or node.kwargs or node.dyn_args or node.dyn_kwargs:
            return None
        pieces = form.split("{}")
        if len(pieces) != len(values) + 1:
            return None
        return _joined([pieces[0], *(part for pair in zip(values, pieces[1:], strict=True) for part in pair)])
    return None


def _joined(parts: list[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or sum(map(len, known)) > _MAX_CHARACTERS:
        return None
    return "".join(known)
