"""``kvmmu config``: files of settings.

What lives here: ``check`` and ``show``. What never lives here: settings (see :mod:`kvmmu.config`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from .around import exit_codes, show

__all__ = ["COMMAND"]

app = typer.Typer(
    name="config",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Files of settings: docs/configuration.md.",
    no_args_is_help=True,
)


@app.command(name="check")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML.", show_default=False)],
    blocks: Annotated[
        int | None,
        typer.Option(help="Blocks of the pool, where the file does not say.", show_default=False),
    ] = None,
    bytes_per_block: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes of a block over all layers, where the file has no model.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check a file, and print what each setting becomes. Exit status 2: all that is wrong."""
    with exit_codes():
        from ..config import Config
        from ..config.units import parse_bytes
        from ..errors import InvalidConfig

        size = None
        if bytes_per_block is not None:
            try:
                plain = bytes_per_block.isascii() and bytes_per_block.isdigit()
                size = parse_bytes(int(bytes_per_block) if plain else bytes_per_block)
            except ValueError as error:
                text = f"--bytes-per-block: {bytes_per_block} given, {error}"
                raise InvalidConfig(text) from None
        config = Config.load(file)
        resolved = config.resolve(num_blocks=blocks, bytes_per_block=size)
        show(f"{file}: fine", as_is=True)
        for became in resolved.became:
            show(f"{became.key}: {became.given} becomes {became.became}", as_is=True)


@app.command(name="show")
def show_all(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="YAML; none: all defaults.", show_default=False),
    ] = None,
) -> None:
    """Print the whole configuration, defaults included, as YAML."""
    with exit_codes():
        from ..config import Config

        config = Config() if file is None else Config.load(file)
        show(config.to_yaml().rstrip("\n"), as_is=True)


COMMAND = app
