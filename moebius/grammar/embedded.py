"""Grammars that users write (Lark's dialect, as OpenAI's custom tools have it), where a call has its text.

There the text is either the inside of a JSON string, spelled as such, or it is raw and goes on to a marker
that it must not contain. llguidance's lexer takes the longest match and gives nothing back, so what follows a
terminal (a backslash of JSON's, the marker) must not look like more of it. A grammar without recursion is
therefore made one terminal. In others the marker becomes part of the last terminal, and terminals that JSON's
escapes may go on are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from moebius.grammar.lark import GrammarError, quoted
from moebius.grammar.lark_reader import Alternatives, Atom, Grammar, Item, decoded, read_lark
from moebius.grammar.regex import ANYTHING, atoms, escaped, in_json, literal


def text_grammar(
    syntax: str, definition: str, end: str | None = None, not_in_text: Sequence[str] = ()
) -> str:
    """Returns the body of a rule for the texts of a user's grammar.

    Args:
        syntax: lark or regex.
        definition: the grammar, whose rule `start` is the text; or the expression, for all of it.
        end: None: the text is spelled as inside of a JSON string. Else it is raw, and this follows it.
        not_in_text: what no terminal of a raw text may contain.

    Raises:
        GrammarError: it cannot be read, or has what cannot be enforced.
    """
    if syntax == "regex":
        grammar = Grammar(
            rules={
                "start": (
                    (Item(Atom("regex", literal(definition)) if definition else Atom("string", '""')),),
                )
            }
        )
    elif syntax == "lark":
        grammar = read_lark(definition)
    else:
        raise GrammarError(f"the syntax of a grammar is 'lark' or 'regex', got {syntax!r:.100}")
    writer = _Writer(grammar, None if end is None else (end, tuple(not_in_text)))
    try:
        return f"%lark {{\n{writer.text()}}}"
    except RecursionError:
        raise GrammarError("its rules and terminals are nested too deeply") from None


class _Writer:
    """The same grammar for llguidance, with its terminals as the place of the text needs them."""

    def __init__(self, grammar: Grammar, raw: tuple[str, tuple[str, ...]] | None) -> None:
        """`raw`: what follows the text, and what is not in it; None: it is spelled as JSON."""
        self._grammar = grammar
        self._raw = raw
        self._added: dict[str, str] = {}  # rules and terminals by name
        self._by_body: dict[str, str] = {}  # names of some of them
        self._spells_escapes: dict[str, bool] = {}  # by terminal: whether JSON spells any of its characters
        self._last_rules: list[str] = []  # whose variants that end with the marker are needed
        nested = set(grammar.rules) if grammar.ignored else _recursive(grammar.rules)
        self._terminals = {**grammar.terminals}
        self._terminals |= {name: one for name, one in grammar.rules.items() if name not in nested}
        self._rules = {name: one for name, one in grammar.rules.items() if name in nested}
        self._names = {name: f"T{number}" for number, name in enumerate(self._terminals)}
        self._names |= {name: f"r{number}" for number, name in enumerate(self._rules)}

    def text(self) -> str:
        """Returns all rules, the first of which is `start`."""
        for name, alternatives in self._terminals.items():
            self._added[self._names[name]] = self._written(alternatives, self._in_terminal)
        for name, alternatives in self._rules.items():
            self._added[self._names[name]] = self._written(alternatives, self._in_rule)
        whole = Item(Atom("name", "start"))
        start = self._item(whole, self._in_rule) if self._raw is None else self._ended(whole)
        for name in self._last_rules:  # which grows
            self._added[f"{self._names[name]}_last"] = self._last(self._rules[name])
        ignored = [f"%ignore {self._ignored(one)}" for one in self._grammar.ignored]
        lines = [f"{name}: {body}" for name, body in self._added.items()]
        return "\n".join([f"start: {start}", *lines, *ignored]) + "\n"

    def _ignored(self, alternatives: Alternatives) -> str:
        """Returns what is ignored, as one terminal; of a run of white space one character, as JSON
        spells it.
        """
        for sequence in alternatives:
            atom = sequence[0].atom if len(sequence) == 1 else None
            if atom is not None and atom.kind == "name" and atom.text in self._terminals:
                return self._ignored(self._terminals[atom.text])
        if self._raw is None:
            alternatives = tuple(tuple(map(_one_character, sequence)) for sequence in alternatives)
            self._refuse_open_end("%ignore", alternatives)
        name = f"IGNORED_{len(self._added)}"
        self._added[name] = self._written(alternatives, self._in_terminal)
        return name

    def _refuse_open_end(self, name: str, alternatives: Alternatives) -> None:
        """GrammarError for a terminal between rules that an escape may go on, which could be what follows."""
        if any(self._is_open(sequence) for sequence in alternatives):
            raise GrammarError(
                f"{name!r} may go on with a line break, a quote or a backslash, which a grammar with "
                "recursive rules or %ignore cannot tell from what follows inside of a JSON string"
            )

    def _is_open(self, sequence: tuple[Item, ...]) -> bool:
        if not sequence:
            return False
        item = sequence[-1]
        if item.least != item.most and self._has_escapes(item.atom):
            return True
        if item.atom.kind == "regex" and self._has_escapes(item.atom):
            return [kind for kind, _ in atoms(_expression(item.atom)[0])][-1] in ("repeat", "close")
        return any(self._is_open(inner) for inner in self._inside(item.atom))

    def _has_escapes(self, atom: Atom) -> bool:
        """Returns whether JSON spells any of its characters otherwise."""
        if atom.kind == "name" and atom.text in self._spells_escapes:
            return self._spells_escapes[atom.text]
        if atom.kind in ("group", "name"):
            found = any(self._has_escapes(item.atom) for inner in self._inside(atom) for item in inner)
            if atom.kind == "name":
                self._spells_escapes[atom.text] = found
            return found
        return r"\\\\" in self._terminal(atom)

    def _inside(self, atom: Atom) -> Alternatives:
        return atom.group if atom.kind == "group" else self._terminals.get(atom.text, ())

    def _written(self, alternatives: Alternatives, write: Callable[[Atom], str]) -> str:
        made = (" ".join(self._item(item, write) for item in sequence) or '""' for sequence in alternatives)
        return " | ".join(made)

    def _item(self, item: Item, write: Callable[[Atom], str]) -> str:
        atom = item.atom
        text = f"({self._written(atom.group, write)})" if atom.kind == "group" else write(atom)
        return text + _repeat(item.least, item.most)

    def _in_terminal(self, atom: Atom) -> str:
        """Returns an atom of a terminal's definition."""
        if atom.kind == "name":
            if atom.text not in self._terminals:
                raise GrammarError(f"the grammar has no {atom.text!r:.100} that could stand here")
            return self._names[atom.text]
        return self._terminal(atom)

    def _terminal(self, atom: Atom) -> str:
        if atom.kind == "string":
            text = decoded(atom.text)
            if atom.text.endswith("i"):
                return literal(self._spelled("".join(map(_any_case, text))))
            return quoted(text if self._raw is not None else json.dumps(text, ensure_ascii=False)[1:-1])
        if atom.kind == "range":
            return literal(self._spelled(atom.text))
        expression, flags = _expression(atom)
        if self._raw is not None:
            return atom.text
        return literal(in_json(expression, "s" in flags)) + "".join(flag for flag in flags if flag in "im")

    def _spelled(self, expression: str) -> str:
        return expression if self._raw is not None else in_json(expression)

    def _in_rule(self, atom: Atom) -> str:
        """Returns an atom of a rule's definition."""
        if atom.kind == "name" and atom.text in self._rules:
            return self._names[atom.text]
        if self._raw is None:
            if self._rules:
                self._refuse_open_end(atom.text, ((Item(atom),),))
            return self._in_terminal(atom)
        return self._in_terminal(atom) if atom.kind == "string" else self._named(self._within(atom), "WITHIN")

    def _within(self, atom: Atom) -> str:
        """Returns a terminal's texts without what ends the whole text, or the call."""
        assert self._raw is not None
        found = "|".join(map(escaped, self._raw[1]))
        return f"({self._in_terminal(atom)}) & ~{literal(f'{ANYTHING}(?:{found}){ANYTHING}')}"

    def _named(self, body: str, kind: str) -> str:
        name = self._by_body.get(body)
        if name is None:
            name = self._by_body[body] = f"{kind}_{len(self._added)}"
            self._added[name] = body
        return name

    def _ending(self, name: str) -> str:
        if name not in self._last_rules:
            self._last_rules.append(name)
        return f"{self._names[name]}_last"

    def _last(self, alternatives: Alternatives) -> str:
        """Alternatives with the text's end after them, in their last terminals."""
        assert self._raw is not None
        made: list[str] = []
        for sequence in alternatives:
            before = list(sequence)
            while before:  # items at the end that may be left out
                item = before.pop()
                made.append(
                    " ".join([*(self._item(one, self._in_rule) for one in before), self._ended(item)])
                )
                if item.least > 0:
                    break
            else:
                made.append(quoted(self._raw[0]))
        return " | ".join(made)

    def _ended(self, item: Item) -> str:
        """Returns the last one of an item that is repeated, after those before it."""
        assert self._raw is not None
        if item.most == 0:
            return quoted(self._raw[0])
        fewer = Item(item.atom, max(item.least - 1, 0), None if item.most is None else item.most - 1)
        before = "" if fewer.most == 0 else self._item(fewer, self._in_rule)
        atom, end = item.atom, quoted(self._raw[0])
        if atom.kind == "group":
            last = f"({self._last(atom.group)})"
        elif atom.text in self._rules:
            last = self._ending(atom.text)
        elif atom.kind == "string":
            last = f"{self._in_terminal(atom)} {end}"
        else:
            last = self._named(f"({self._within(atom)}) {end}", "LAST")
        return f"{before} {last}".strip()


def _recursive(rules: Mapping[str, Alternatives]) -> set[str]:
    """Returns the rules that need themselves, and rules that need those."""
    needs = {name: set(_names_in(alternatives)) & rules.keys() for name, alternatives in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, needed in needs.items():
        for one in needed:
            users[one].append(name)
    # Rules that need none that is left are taken away, in the order of Kahn's topological sort.
    left = {name: len(needed) for name, needed in needs.items()}
    flat = [name for name, count in left.items() if count == 0]
    while flat:
        for user in users[flat.pop()]:
            left[user] -= 1
            if left[user] == 0:
                flat.append(user)
    return {name for name, count in left.items() if count}


def _names_in(alternatives: Alternatives) -> Iterator[str]:
    for sequence in alternatives:
        for item in sequence:
            if item.atom.kind == "name":
                yield item.atom.text
            yield from _names_in(item.atom.group)


def _one_character(item: Item) -> Item:
    """Returns one of a repeated class of characters, which may be repeated by itself."""
    if item.atom.kind != "regex":
        return item
    expression, _ = _expression(item.atom)
    kinds = [kind for kind, _ in atoms(expression)]
    if len(kinds) != 2 or kinds[0] not in ("character", "class") or kinds[1] != "repeat":
        return item
    return Item(Atom("regex", literal(next(text for _, text in atoms(expression)))))


def _expression(atom: Atom) -> tuple[str, str]:
    """Returns the expression and the flags of a regular expression's text.

    Raises GrammarError for other flags.
    """
    body, _, flags = atom.text[1:].rpartition("/")
    if set(flags) - set("imsu"):
        raise GrammarError(f"the flags {flags!r} of {atom.text:.100} are not supported")
    return body.replace(r"\/", "/"), flags


def _any_case(character: str) -> str:
    lower, upper = character.lower(), character.upper()
    if lower == upper or len(lower) != 1 or len(upper) != 1:
        return escaped(character)
    return f"[{lower}{upper}]"


def _repeat(least: int, most: int | None) -> str:
    known = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}
    if (least, most) in known:
        return known[(least, most)]
    return f"{{{least},{'' if most is None else most}}}"
