"""The table of keys in docs/configuration.md, made of the settings themselves.

What lives here: :func:`reference`. What never lives here: text about a setting.
"""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from .files import Section, describe
from .settings import Model, PagedAttention, Sections

__all__ = ["reference"]


def reference() -> str:
    """Markdown: a table a section, a row a key with default, what is allowed, and what it is."""
    parts = []
    for name, field in Sections.model_fields.items():
        section = Model if name == "model" else type(field.default)
        parts.append(_section(name, section))
    parts.append(_section("paged_attention", PagedAttention))
    return "\n".join(parts)


def _section(name: str, section: type[Section]) -> str:
    lines = [
        f"### `{name}`",
        "",
        " ".join((section.__doc__ or "").split()),
        "",
        "| key | default | allowed | |",
        "|---|---|---|---|",
    ]
    for key, field in section.model_fields.items():
        allowed = describe(field.annotation, tuple(field.metadata)).replace("|", "\\|")
        about = " ".join((field.description or "").split())
        lines.append(f"| `{key}` | {_default(field)} | {allowed} | {about} |")
    return "\n".join([*lines, ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value: Any = field.default
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
