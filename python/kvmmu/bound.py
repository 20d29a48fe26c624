"""What stands for memory or handles of this process, and means nothing anywhere else.

What lives here: :class:`Bound`, a base that refuses to be copied or pickled. What never lives here:
anything else.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Bound"]


class Bound:
    """Cannot be copied or pickled: an address, a lock or a handle would be shared or made up."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} stands for memory or a handle of this process: it cannot be "
            "copied or pickled; make one where it is needed"
        )
