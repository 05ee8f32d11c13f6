"""The one exception for what a client sent and no engine could serve."""

from __future__ import annotations


class BadRequest(Exception):
    """The request cannot be served as it is; the text is for its sender. `code` and `param` as in OpenAI's errors."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
