"""Files of settings: read with the line of every key, held to a model, refused with all faults.

What lives here: :class:`Document`, :func:`read`, and :func:`check`, which turns what pydantic finds
into one InvalidConfig. What never lives here: any particular setting. Models derive from
:class:`Section`.

A message names file, line, key, what was given and what is allowed::

    kvmmu.yaml:3: pool.block_size: "16" given, allowed: a whole number, 1 to 4096
"""

from __future__ import annotations

import enum
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import annotated_types
import pydantic
from pydantic import BaseModel, ConfigDict

from ..errors import InvalidConfig
from .yaml_text import MAX_DEPTH, MAX_VALUES, Node, parse

__all__ = [
    "MAX_BYTES",
    "Allowed",
    "Contradictions",
    "Document",
    "Keys",
    "Section",
    "check",
    "describe",
    "read",
]

MAX_BYTES = 1 << 18
Keys = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)
_SHOWN = 60
Fault = tuple[int, str, str]
"""Line, dotted key, text."""


class Document:
    """Plain data and the lines of its keys.

    Attributes:
        name: of the file, or what stands for it in messages.
        data: dict of dicts, lists, str, int, float, bool and None.
    """

    def __init__(self, name: str, root: Node) -> None:
        self.name = name
        self._root = root
        if not isinstance(root.value, dict):
            raise InvalidConfig(
                f"{self.place(())}: {_shown(root.value)} given, allowed: a mapping", file=name
            )
        self.data: dict[str, Any] = root.value
        self._called: dict[Keys, Keys] = {}

    @classmethod
    def of(cls, data: Any, name: str = "configuration") -> Document:
        """Of a dict that no file stands behind: its messages name keys and no lines.

        Raises:
            InvalidConfig: something in it that no file could hold.
        """
        return cls(name, _plain(data, name, (), [0]))

    def line(self, keys: Keys) -> int:
        """Line of a key, from 1: of the nearest one above it that is there, where it is not. 0
        without a file."""
        return self._find(keys)[1].line

    def place(self, keys: Keys) -> str:
        """``file:line``, or the name alone where no file stands behind it."""
        line = self.line(keys)
        return f"{self.name}:{line}" if line else self.name

    def moved(self, names: Mapping[Keys, Keys], values: Mapping[Keys, Any]) -> Document:
        """The same with some keys elsewhere, of the same lines; messages go on to call them as the
        file does.

        Args:
            names: from keys to keys.
            values: what stands there from now on, by the new keys, where it is not the same.

        Raises:
            InvalidConfig: both of two names are there.
        """
        root = _copied(self._root)
        called = dict(self._called)
        faults: list[Fault] = []
        for old, new in names.items():
            found, node = self._find(old)
            if found != old or node.value is None:
                continue
            there, other = self._find(new)
            if there == new:
                where = f" in line {other.line}" if other.line else ""
                text = f"{dotted(old)}: given twice, as {dotted(new)}{where} too"
                faults.append((node.line, dotted(old), text))
                continue
            value = values.get(new, node.value)
            _put(root, new, Node(value, node.line, node.size, node.children))
            called[new] = old
        if faults:
            raise _all(self.name, faults)
        for old in {names[:1] for names in names}:
            root.children.pop(old[0], None)
            root.value.pop(old[0], None)
        document = Document(self.name, root)
        document._called = called
        return document

    def has(self, keys: Keys) -> bool:
        """Whether these keys are there."""
        return self._find(keys)[0] == keys

    def called(self, keys: Keys) -> str:
        """Some keys, dotted, as the file has them."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self._called:
                return dotted((*self._called[keys[:length]], *keys[length:]))
        return dotted(keys)

    def refuse(self, found: Iterable[tuple[Keys, str]]) -> None:
        """Raises InvalidConfig with all of these (keys, sentence), if there are any."""
        faults = [
            (self.line(keys), self.called(keys), f"{self.called(keys)}: {sentence}")
            for keys, sentence in found
        ]
        if faults:
            raise _all(self.name, faults)

    def _find(self, keys: Keys) -> tuple[Keys, Node]:
        """The part of some keys that is there, and its node."""
        node, found = self._root, 0
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            node, found = child, found + 1
        return keys[:found], node


def read(path: str | Path) -> Document:
    """Reads a YAML file (JSON is YAML too): UTF-8, at most 256 KiB, one mapping.

    Raises:
        InvalidConfig: names the file, the line and what is allowed.
    """
    name = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"{name}: cannot be read: {reason}", file=name) from None
    if len(raw) > MAX_BYTES:
        raise InvalidConfig(f"{name}: larger than {MAX_BYTES} bytes, the most allowed", file=name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InvalidConfig(
            f"{name}:{line}: not UTF-8 (byte {raw[error.start]:#04x})", file=name
        ) from None
    return Document(name, parse(text, name))


def _plain(value: Any, name: str, keys: Keys, count: list[int]) -> Node:
    """Nodes without lines; ``count``: values so far."""
    count[0] += 1
    if count[0] > MAX_VALUES or len(keys) > MAX_DEPTH:
        raise InvalidConfig(
            f"{name}: more than {MAX_VALUES} values, or deeper than {MAX_DEPTH} levels", file=name
        )
    if value is None or type(value) in (str, int, float, bool):
        return Node(value, 0)
    node = Node(None, 0)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InvalidConfig(f"{name}: {dotted(keys)}: key {key!r}, allowed: names")
            node.children[key] = _plain(value[key], name, (*keys, key), count)
        node.value = {key: child.value for key, child in node.children.items()}
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            node.children[index] = _plain(item, name, (*keys, index), count)
        node.value = [child.value for child in node.children.values()]
    else:
        raise InvalidConfig(
            f"{name}: {dotted(keys)}: {type(value).__name__} given, allowed: what a file could "
            "hold (mappings, lists, text, numbers, true, false, null)",
            file=name,
        )
    return node


def _copied(node: Node) -> Node:
    """A mapping and the mappings in it, so that keys can be added."""
    if not isinstance(node.value, dict):
        return node
    children = {key: _copied(child) for key, child in node.children.items()}
    value = {key: child.value for key, child in children.items()}
    return Node(value, node.line, node.size, children)


def _put(root: Node, keys: Keys, node: Node) -> None:
    for key in keys[:-1]:
        below = root.children.get(key)
        if below is None:
            below = Node({}, node.line)
            root.children[key] = below
            root.value[key] = below.value
        root = below
    root.children[keys[-1]] = node
    root.value[keys[-1]] = node.value


# -- models ------------------------------------------------------------------------------------


class Allowed(str):
    """Metadata of a field: what its messages say is allowed."""

    __slots__ = ()


class Contradictions(ValueError):
    """Settings that are allowed each and not together: (keys below the model, sentence)."""

    def __init__(self, found: Iterable[tuple[Keys, str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(sentence for _, sentence in self.found))


class Section(BaseModel):
    """A mapping of a file: unknown keys and values of another type are refused, and it cannot be
    changed. A whole number is one without a point (3.0 and 1e3 are none), true is no number, and
    text in quotes is no number."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        """What does not go together: keys, and a sentence that says what is allowed."""
        return iter(())

    @pydantic.model_validator(mode="after")
    def _agree(self) -> typing.Self:
        found = tuple(self.contradictions())
        if found:
            raise Contradictions(found)
        return self


def check(model: type[Model], document: Document) -> Model:
    """Holds a document to a model.

    Raises:
        InvalidConfig: all faults, one a line. Numbers: ``file``, and ``faults``, dicts of ``line``,
            ``key`` and ``text``.
    """
    # As JSON: there a list may become a tuple, and text an enumeration, however strict the model.
    try:
        return model.model_validate_json(json.dumps(document.data), strict=True)
    except pydantic.ValidationError as error:
        found = [fault for entry in error.errors() for fault in _faults(model, document, entry)]
    raise _all(document.name, found)


def _all(name: str, found: Iterable[Fault]) -> InvalidConfig:
    """One error of all faults, in the order of their lines."""
    faults = dict.fromkeys(sorted(found, key=lambda fault: fault[0]))
    lines = [f"{name}:{line}: {text}" if line else f"{name}: {text}" for line, _, text in faults]
    return InvalidConfig(
        "\n".join(lines),
        file=name,
        faults=tuple({"line": line, "key": key, "text": text} for line, key, text in faults),
    )


def _faults(model: type[BaseModel], document: Document, entry: Any) -> Iterator[Fault]:
    """What pydantic found. Its places may name branches of unions, which are no keys."""
    kind, where = entry["type"], entry["loc"]
    keys, node = document._find(where)
    if kind == "too_short" and len(node.value) >= entry["ctx"]["min_length"]:
        return  # pydantic counted the items that are fine; the others have faults of their own
    if kind == "missing":
        wanted = (*keys, where[-1])
        name = document.called(wanted)
        yield node.line, name, f"{name}: missing, needed: {_allowed_at(model, wanted) or 'a value'}"
        return
    cause = entry.get("ctx", {}).get("error")
    if isinstance(cause, Contradictions):
        for below, sentence in cause.found:
            full = (*keys, *below)
            name = document.called(full)
            yield document.line(full), name, f"{name}: {sentence}"
        return
    name = document.called(keys)
    if kind == "extra_forbidden":
        text = f"{name}: unknown key, {_names(_type_at(model, keys[:-1])[0], str(keys[-1]))}"
    elif cause is not None:
        text = f"{name}: {_shown(node.value)} given, {cause}"
    else:
        allowed = _allowed_at(model, keys) or _first_lower(entry["msg"])
        text = f"{name}: {_shown(node.value)} given, allowed: {allowed}"
        if isinstance(node.value, str) and _number_in(node.value):
            text += " (without quotes)"
        elif isinstance(node.value, float) and kind == "int_type" and node.value.is_integer():
            text += f" ({int(node.value)})"
    yield node.line, name, text


def dotted(keys: Keys) -> str:
    """``a.b[0].c``; "the file" for no keys."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the file"


def _names(annotation: Any, given: str) -> str:
    """What a key may be called, the nearest names first."""
    within = (annotation, *typing.get_args(annotation))  # a section may be optional
    fields: Any = next((part.model_fields for part in within if hasattr(part, "model_fields")), ())
    near = get_close_matches(given, fields, n=3, cutoff=0.6)
    listed = f"allowed: {', '.join(fields)}"
    return f"did you mean {' or '.join(near)}? {listed}" if near else listed


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' * (value < 0)}.inf"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _number_in(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _first_lower(sentence: str) -> str:
    sentence = sentence.removeprefix("Input should be ")
    return sentence[:1].lower() + sentence[1:]


# -- what a field allows -----------------------------------------------------------------------


def _allowed_at(model: type[BaseModel], keys: Keys) -> str:
    return describe(*_type_at(model, keys))


def _type_at(model: type[BaseModel], keys: Keys) -> tuple[Any, tuple[Any, ...]]:
    """Annotation and metadata of the field at some keys; (None, ()) where that is unclear."""
    annotation: Any = model
    metadata: tuple[Any, ...] = ()
    for key in keys:
        annotation, metadata = _below(annotation, key)
        if annotation is None:
            break
    return annotation, metadata


def _below(annotation: Any, key: str | int) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        if key not in fields:
            return None, ()
        found = fields[str(key)]
        return found.annotation, tuple(found.metadata)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _below(arguments[0], key)
    if origin in (typing.Union, types.UnionType):
        found_below = [_below(argument, key) for argument in arguments]
        known = [entry for entry in found_below if entry[0] is not None]
        return known[0] if len(known) == 1 else (None, ())
    if origin is dict and len(arguments) == 2:
        return _split(arguments[1])
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is ...):
        in_it = isinstance(key, int) and key < len(arguments)
        return _split(arguments[int(key)]) if in_it else (None, ())
    if origin in (list, tuple, set, frozenset) and arguments:
        return _split(arguments[0])
    return None, ()


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Annotation and metadata of an ``Annotated``."""
    if typing.get_origin(annotation) is Annotated:
        first, *metadata = typing.get_args(annotation)
        return first, tuple(metadata)
    return annotation, ()


_SIMPLE = {bool: "true or false", type(None): "null"}


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What may stand there, for people; "" where this does not know."""
    for entry in metadata:
        if isinstance(entry, Allowed):
            return str(entry)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0], (*arguments[1:], *metadata))
    if origin is Literal:
        return _or([_shown(choice) for choice in arguments])
    if origin in (typing.Union, types.UnionType):
        rest = [argument for argument in arguments if argument is not type(None)]
        parts = [describe(argument, metadata) for argument in rest]
        if not all(parts):
            return ""
        return _or(parts) + (", or null" if len(rest) < len(arguments) else "")
    if origin in (list, tuple, set, frozenset):
        item = describe(arguments[0]) if arguments else ""
        return f"a list{_range(metadata, ' with', ' items')}" + (f", each {item}" if item else "")
    if origin is dict or annotation is dict:
        return "a mapping"
    if not isinstance(annotation, type):
        return ""
    if issubclass(annotation, enum.Enum):
        return _or([_shown(member.value) for member in annotation])
    if issubclass(annotation, BaseModel):
        return f"a mapping with any of {', '.join(annotation.model_fields)}"
    if annotation is str:
        return "text" + _range(metadata, " of", " characters")
    if annotation is int:
        return "a whole number" + _range(metadata, ",")
    if annotation is float:
        return "a number" + _range(metadata, ",")
    return _SIMPLE.get(annotation, "")


def _range(metadata: tuple[Any, ...], before: str, after: str = "") -> str:
    """The limits among a field's metadata."""
    low = high = ""
    for entry in _unpacked(metadata):
        if isinstance(entry, annotated_types.Ge):
            low = f"{_figure(entry.ge)}"
        elif isinstance(entry, annotated_types.Gt):
            low = f"above {_figure(entry.gt)}"
        elif isinstance(entry, annotated_types.Le):
            high = f"{_figure(entry.le)}"
        elif isinstance(entry, annotated_types.Lt):
            high = f"below {_figure(entry.lt)}"
        elif isinstance(entry, annotated_types.MinLen):
            low = f"{entry.min_length}"
        elif isinstance(entry, annotated_types.MaxLen):
            high = f"{entry.max_length}"
    if low and high:
        return f"{before} {low} to {high}{after}"
    if low:
        return f"{before} {low}{'' if low.startswith('above') else ' or more'}{after}"
    if high:
        return f"{before} {'' if high.startswith('below') else 'up to '}{high}{after}"
    return ""


def _unpacked(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """``Field(ge=1)`` within an annotation still holds its limits itself."""
    for entry in metadata:
        if isinstance(entry, pydantic.fields.FieldInfo):
            yield from entry.metadata
        else:
            yield entry


def _figure(limit: Any) -> str:
    return f"{limit:.12g}" if isinstance(limit, float) else str(limit)


def _or(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
