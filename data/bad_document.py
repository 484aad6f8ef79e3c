"""A document that cannot be used."""

from __future__ import annotations


class BadDocument(ValueError):
    """Reason why a document cannot be used.

    Args:
        message: the reason.
        further: number of lines between the document's first line and the bad one.
    """

    def __init__(self, message: str, further: int = 0) -> None:
        super().__init__(message)
        self.further = further
