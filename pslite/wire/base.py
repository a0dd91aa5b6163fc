"""``Message``, the base class of all messages, and the types of their fields.

``Ints`` fields are sent as packed little-endian 64-bit words, one word per element, so a message
about hundreds of parts needs no parsing element by element. Read next: ``messages.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pslite.ids import NodeInfo

Ints = tuple[int, ...]
Natural = Annotated[int, "never negative"]
Naturals = Annotated[Ints, "never negative"]
Texts = tuple[str, ...]
Nodes = tuple[NodeInfo, ...]


@dataclass(eq=False, repr=False)
class Message:
    """Base of all messages: values that do not change once they are made.

    Subclasses are dataclasses that inherit equality and ``repr`` from here and are not frozen. So
    every process of a job defines them in a quarter of the time, and makes each message faster.
    """

    __slots__: ClassVar[tuple[str, ...]] = ()

    #: Whether the message is numbered, acknowledged and resent until it is accepted.
    RELIABLE: ClassVar[bool] = True
    #: Fields that must have the same number of elements.
    PARALLEL: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({shown})"
