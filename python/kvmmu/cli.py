"""The door of the command line: ``kvmmu``.

What lives here: :func:`main`, the exit codes, and the word for those who installed kvmmu without
``kvmmu[cli]``. What never lives here: commands (see :mod:`.commands`), and any import that may be
missing.

Exit codes: 0 fine, 1 a check failed (or had nothing to check: every request was refused), 2 bad
input, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from .errors import MissingExtra

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from .commands import app

        app(args=_with_optional_values(arguments), prog_name="kvmmu")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except MissingExtra as error:
        print(f"kvmmu: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f"kvmmu: the command line needs {missing}, which is not installed: "
            "pip install 'kvmmu[cli]'",
            file=sys.stderr,
        )
        return 2
    except OSError as error:  # help and version are printed by libraries
        if error.errno != errno.ENOSPC:
            raise
        print(f"kvmmu: the standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _with_optional_values(arguments: list[str]) -> list[str]:
    """``--sample`` may stand alone or before a name: Typer wants its value spelled out."""
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            out += [argument, *rest]
        elif argument == "--sample":
            following = next(rest, None)
            if following in ("small", "article"):
                out.append(f"--sample={following}")
            else:
                out.append("--sample=small")
                if following is not None:
                    out += _with_optional_values([following, *rest])
        else:
            out.append(argument)
    return out


if __name__ == "__main__":
    sys.exit(main())
