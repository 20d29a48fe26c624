"""YAML as plain data, with the line of every key.

What lives here: :func:`parse` and what it refuses. What never lives here: what a key means, and
files.

The values are those of YAML 1.2's core schema: ``yes``, ``on`` and dates are text, ``1e3`` is a
number, ``0o17`` is fifteen. Tags beyond that schema, merge keys, keys that are no text, duplicate
keys, several documents, aliases that contain themselves, and whatever is larger or deeper than the
limits below are refused: a configuration has no need of them, and each has hurt somebody.

The events of PyYAML's parser are used and none of its constructors, so that no tag builds anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import InvalidConfig

__all__ = ["MAX_DEPTH", "MAX_VALUES", "Node", "parse"]

MAX_DEPTH = 32
"""Mappings and lists within each other."""
MAX_VALUES = 50_000
"""Keys, items and mappings, aliases counted as what they stand for."""
_MAX_DIGITS = 400
_MAX_SENTENCE = 300

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_SCHEMA = "tag:yaml.org,2002:"
_KINDS: dict[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "null": type(None),
}


@dataclass(slots=True)
class Node:
    """A value and where it stands.

    Attributes:
        value: dict, list, str, int, float, bool or None.
        line: of its key, of a list's item, or where the document begins; from 1.
        size: values in it, itself included and aliases written out.
        children: nodes by key, or by index.
    """

    value: Any
    line: int
    size: int = 1
    children: dict[str | int, Node] = field(default_factory=dict)


def parse(text: str, name: str) -> Node:
    """Reads one document.

    Args:
        text: YAML.
        name: of the file, for messages.

    Raises:
        InvalidConfig: ``name:line: what is wrong and what is allowed``.
    """
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        return _Builder(name, events).document()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _invalid(
            name, line, f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        raise _invalid(name, mark.line + 1 if mark else 1, f"this is not YAML: {what}") from None


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 1 if mark is None else mark.line + 1


def _invalid(name: str, line: int, sentence: str) -> InvalidConfig:
    sentence = sentence if len(sentence) <= _MAX_SENTENCE else f"{sentence[:_MAX_SENTENCE]}..."
    fault = {"line": line, "key": "", "text": sentence}
    return InvalidConfig(f"{name}:{line}: {sentence}", file=name, faults=(fault,))


class _Builder:
    """Makes nodes of events."""

    def __init__(self, name: str, events: Iterator[yaml.Event]) -> None:
        self._name = name
        self._events = events
        self._anchors: dict[str, Node | None] = {}
        """None: a value that has not ended yet."""
        self._count = 0

    def document(self) -> Node:
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._fault(event, "a second document begins, allowed: one")
                root = self._node(next(self._events), 0)
        if root is None:
            raise _invalid(self._name, 1, "the file is empty, allowed: a mapping ({} for defaults)")
        return root

    def _fault(self, event: yaml.Event, sentence: str) -> InvalidConfig:
        return _invalid(self._name, _line(event), sentence)

    def _node(self, event: yaml.Event, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._fault(event, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            node = self._alias(event)
        else:
            assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
            anchor = event.anchor
            if anchor is not None:
                self._anchors[anchor] = None
            node = Node(None, _line(event))
            if isinstance(event, yaml.ScalarEvent):
                node.value = self._scalar(event)
            elif isinstance(event, yaml.MappingStartEvent):
                self._check_tag(event, "map")
                self._mapping(node, depth)
            else:
                assert isinstance(event, yaml.SequenceStartEvent)
                self._check_tag(event, "seq")
                self._list(node, depth)
            if anchor is not None:
                self._anchors[anchor] = node
        self._count += node.size if isinstance(event, yaml.AliasEvent) else 1
        if self._count > MAX_VALUES:
            raise self._fault(event, f"more than {MAX_VALUES} values, aliases written out")
        return node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        if event.anchor not in self._anchors:
            raise self._fault(event, f"alias *{event.anchor}: nothing above is called so")
        node = self._anchors[event.anchor]
        if node is None:
            raise self._fault(event, f"alias *{event.anchor}: stands within what it stands for")
        return node

    def _mapping(self, node: Node, depth: int) -> None:
        node.value = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                return
            key = self._key(event)
            line = _line(event)
            if key in node.children:
                first = node.children[key].line
                raise self._fault(event, f"{key}: given twice, first in line {first}")
            child = self._node(next(self._events), depth + 1)
            self._add(node, key, child, line)
            node.value[key] = child.value

    def _list(self, node: Node, depth: int) -> None:
        node.value = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                return
            child = self._node(event, depth + 1)
            self._add(node, len(node.value), child, _line(event))
            node.value.append(child.value)

    @staticmethod
    def _add(node: Node, key: str | int, child: Node, line: int) -> None:
        # An alias shares its children and has a line of its own.
        node.children[key] = Node(child.value, line, child.size, child.children)
        node.size += child.size

    def _key(self, event: yaml.Event) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None:
            raise self._fault(event, "a key that is no plain text, allowed: names")
        key = self._scalar(event)
        if key == "<<" and event.style is None:
            raise self._fault(event, "merge keys (<<) are not read: write the keys out")
        if not isinstance(key, str):
            raise self._fault(event, f"key {event.value}: is no text, allowed: names")
        self._count += 1
        return key

    def _check_tag(self, event: yaml.CollectionStartEvent, own: str) -> None:
        if event.tag not in (None, "!", _SCHEMA + own):
            raise self._fault(event, f"tag {event.tag}: not allowed here")

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        text, tag = event.value, event.tag
        if tag is None:
            return self._plain(event, text) if event.style is None else text
        if tag in ("!", _SCHEMA + "str"):
            return text
        kind = _KINDS.get(tag.removeprefix(_SCHEMA)) if tag.startswith(_SCHEMA) else None
        if kind is None:
            raise self._fault(event, f"tag {tag}: not allowed, values are plain ones")
        value = self._plain(event, text)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self._fault(event, f"tag {tag}: {text!r} is none")
        return value

    def _plain(self, event: yaml.Event, text: str) -> Any:
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        whole, point = _INT.fullmatch(text), _FLOAT.fullmatch(text)
        if not (whole or point):
            infinite = _INFINITE.fullmatch(text)
            return float(text.replace(".", "")) if infinite else text
        if len(text) > _MAX_DIGITS:
            raise self._fault(event, f"a number of {len(text)} characters, allowed: {_MAX_DIGITS}")
        if not whole:
            return float(text)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
