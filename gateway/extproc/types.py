"""What the ext_proc protocol and whoever picks endpoints tell each other.

The protocol collects a request and hands it over as an `Ask`; the picker answers with a `Pick` or a `Refusal`; what
then becomes of the request the protocol tells the pick's `Watch`. Endpoints are always `ip:port`, IPv6 in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import msgspec
from multidict import CIMultiDict

NO_CONTEXT: Final[Mapping[str, str]] = MappingProxyType({})


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A whole request, as the proxy is about to send it.

    headers: without pseudo-headers, and without those that only we may write (`wire.OWNED`). body: b"" for a request
    without one. blind: there may be a body, but the proxy is configured not to show it (whole); body is b"" then.
    subset: the only endpoints that may be picked, as the proxy says (an address without a port means all its ports);
    never empty; None where it says nothing. context: W3C trace context that the proxy itself has sent with its
    question, where it traces and we do.
    """

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes
    blind: bool = False
    subset: tuple[str, ...] | None = None
    context: Mapping[str, str] = NO_CONTEXT


class Watch(Protocol):
    """Hears what becomes of a picked request. Exactly one of `ended`, `aborted`, `unseen` and `recalled` comes last,
    and only once; none of these may await or raise.
    """

    def responded(self, status: int, headers: CIMultiDict[str], served: str | None) -> None:
        """The response's head. `served`: the endpoint it came from, where the proxy tells; it may be a local reply of
        the proxy about an endpoint it could not reach.
        """

    def chunk(self, data: bytes) -> None:
        """Some of the response's body, as it came."""

    def ended(self) -> None:
        """The response is whole."""

    def aborted(self) -> None:
        """The proxy closed the stream before the response was whole: the client left, or an endpoint broke."""

    def unseen(self) -> None:
        """The proxy is configured to show no responses, and the request is on its way."""

    def recalled(self) -> None:
        """The request was taken back by the pick's `Recall`."""


class Recall:
    """By which a request can be taken back that was sent on, until its response begins. Of a stream that is when its
    first chunk is here, where the protocol lets the head wait for that.
    """

    def __init__(self) -> None:
        self._refuse: Callable[[Refusal], bool] | None = None

    def bind(self, refuse: Callable[[Refusal], bool]) -> None:
        self._refuse = refuse

    def refuse(self, refusal: Refusal) -> bool:
        """Answer it with that; False: it is too late."""
        return self._refuse is not None and self._refuse(refusal)


class Pick(msgspec.Struct, frozen=True, kw_only=True):
    """Where the request goes.

    endpoints: the first is the choice, the others are for proxies that retry. set_headers, remove_headers: beside the
    destination, which the protocol sets itself; those to be removed in lower case. body: in place of the client's;
    None: not a byte changes. rename: a model name of the response and what clients are told instead. hide_headers: of
    the response, not for the client. add_headers: to it. served_header: that tells who has served it, as GAIE's
    conformance suite reads it; None: none does. scores:
    of endpoints, the larger the better, for the proxy's metadata. recall: to take it back by; None: it will not be.
    """

    endpoints: tuple[str, ...]
    watch: Watch
    set_headers: dict[str, str] = {}
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    rename: tuple[str, str] | None = None
    hide_headers: tuple[str, ...] = ()
    add_headers: dict[str, str] = {}
    served_header: str | None = None
    scores: dict[str, float] = {}
    recall: Recall | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to give instead. details: a word for the proxy's log (its response code details)."""

    status: int
    body: bytes
    headers: dict[str, str]
    details: str = ""


class Picker(Protocol):
    async def pick(self, ask: Ask) -> Pick | Refusal:
        """May be cancelled: the client has left, or the decision took too long. Whoever gets a `Pick` answers for its
        watch; a cancelled picker has booked nothing.
        """
