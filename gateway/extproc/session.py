"""One request as Envoy's external processing sees it, without I/O."""

# Theory of operation
#
# A stream of ProcessingRequests is one HTTP request and its response. `feed` takes them one by one and returns the
# ProcessingResponses to send; once the request is all there, `ask` is what is to be decided. Whoever drives the session
# has it decided (`decide` returns what to send then) while it keeps feeding, and calls `close` when the stream is over,
# however that came about.
#
# Request and response are two small machines, since a response may begin before its request is whole: the proxy's own
# errors come through here, and so do upstreams that answer early.
#
#     request:  HEAD -> BODY -> DECIDING -> SENT      response:  HEAD -> BODY -> OVER
#               any but SENT -> DROPPED                          HEAD -> REFUSED
#               (refused, or overtaken by a response)            (there is none: the request was refused)
#
# What may be taken back (`Pick.recall`) can be as long as the proxy has no head of its response. In full duplex the
# head of a stream is held (HEAD -> HELD) until its first chunk, since engines send it before they have begun.
#
# What each message does in each state is a table (_HANDLERS); a pair that is not in it is an error. How bodies are
# exchanged is told by the proxy in its first message and is a table too (_REQUEST_BODIES, _RESPONSE_BODIES):
#
#   FULL_DUPLEX_STREAMED  nothing is answered until the body is whole, then the head, then the body in chunks. Every
#                         byte of a body that is to go on must be sent back, in streamed_response and nothing else.
#                         The proxies of llm-d's time say no mode; then it is this one, as the protocol demands.
#   BUFFERED              the head is answered at once, with nothing; the body comes in one message, whose answer may
#                         still change the head.
#   BUFFERED_PARTIAL      the same, but the body may be cut short.
#   STREAMED, NONE        the head's answer is the last that may change the head, before any of the body is seen: such
#                         requests are decided blindly. Chunks are then let pass.
#
# A WebSocket, and a CONNECT, has no body that ends before it is answered: it is decided by its head, and what either
# side says then passes. A proxy that buffers would wait for ever; there it is refused.
#
# A body is whole when its message says so, when trailers come, or when it is as long as its Content-Length. The end
# itself often comes in an empty message of its own, and is answered by one. Of a body over the limit nothing more is
# kept, and it is refused when it is whole, or twice too long: who is refused while still sending often never reads why.
#
# Errors are exceptions, after which the session only remembers how to close: the stream must then be broken off, never
# ended well, since to end it well means "go on without me" and sends requests to any endpoint, with an empty body.

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from multidict import CIMultiDict

from gateway.extproc import wire
from gateway.extproc.refusals import endless, none_allowed, too_large
from gateway.extproc.rename import Renamer
from gateway.extproc.told import Told
from gateway.extproc.types import Ask, Pick, Refusal
from gateway.pb import ext_proc_pb2 as pb

Answers = list[pb.ProcessingResponse]

_RENAMED_TYPES = ("application/json", "text/event-stream")


class ProtocolError(Exception):
    """The proxy sent what does not fit; the text names the message, nothing of its contents."""


class _State:
    """Told apart by what they are; Enum's members hash too slowly for what comes with every token."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Request:
    HEAD = _State("HEAD")
    BODY = _State("BODY")
    DECIDING = _State("DECIDING")
    SENT = _State("SENT")
    DROPPED = _State("DROPPED")


class _Response:
    HEAD = _State("HEAD")
    HELD = _State("HELD")
    BODY = _State("BODY")
    OVER = _State("OVER")
    REFUSED = _State("REFUSED")


class _Bodies(NamedTuple):
    """How the bodies of one direction are exchanged.

    shown: before the last answer that may change the head. at_once: all in one message. streamed: sent back in chunks.
    ends_seen: the end of each is.
    """

    shown: bool = False
    at_once: bool = False
    streamed: bool = False
    ends_seen: bool = True


_REQUEST_BODIES = {
    pb.FULL_DUPLEX_STREAMED: _Bodies(shown=True, streamed=True),
    pb.BUFFERED: _Bodies(shown=True, at_once=True),
    pb.BUFFERED_PARTIAL: _Bodies(shown=True, at_once=True, ends_seen=False),
    pb.STREAMED: _Bodies(),
    pb.NONE: _Bodies(),
}
_RESPONSE_BODIES = {
    pb.FULL_DUPLEX_STREAMED: _Bodies(streamed=True),
    pb.BUFFERED: _Bodies(at_once=True),
    pb.BUFFERED_PARTIAL: _Bodies(at_once=True, ends_seen=False),
    pb.STREAMED: _Bodies(),
    pb.NONE: _Bodies(ends_seen=False),
}


class Session:
    """`ask` is there while a decision is awaited. Bodies over `max_body_bytes` are refused. `sees_responses` is False
    where the proxy is configured to show none, which it does not tell by itself.
    """

    def __init__(self, *, max_body_bytes: int, sees_responses: bool = True) -> None:
        self.ask: Ask | None = None
        self._max_body_bytes = max_body_bytes
        self._sees_responses = sees_responses
        self._request_bodies: _Bodies | None = None
        self._response_bodies = _RESPONSE_BODIES[pb.FULL_DUPLEX_STREAMED]

        self._request = _Request.HEAD
        self._head = wire.Head(CIMultiDict(), {})
        self._subset: tuple[str, ...] | None = None
        self._has_body = False
        self._is_tunnel = False
        self._parts: list[bytes] = []
        self._last_part = b""
        self._size = 0
        self._whole = False
        self._answered_by = _REQUEST_HEAD
        self._later: deque[pb.ProcessingRequest] = deque()

        self._response = _Response.HEAD
        self._told: Told | None = None
        self._holds = False
        self._held: pb.ProcessingRequest | None = None
        self._rename: tuple[str, str] | None = None
        self._hide_headers: tuple[str, ...] = ()
        self._add_headers: dict[str, str] = {}
        self._served_header: str | None = None
        self._renamer: Renamer | None = None
        self._tells_length = False

    @property
    def decided(self) -> bool:
        """Whether the proxy awaits no decision of ours (any more)."""
        return self._request in (_Request.SENT, _Request.DROPPED)

    def feed(self, message: pb.ProcessingRequest) -> Answers:
        """Raises ProtocolError."""
        if self._request_bodies is None:
            self._request_bodies = self._agree(message)
        kind = message.WhichOneof("request")
        if kind is None:
            raise ProtocolError("a message of no kind")
        state = self._response if kind in _OF_RESPONSES else self._request
        handler = _HANDLERS.get((state, kind))
        if handler is None:
            raise ProtocolError(f"{kind} in state {state.name}")
        return handler(self, message)

    def decide(self, verdict: Pick | Refusal) -> Answers:
        """Carry out what was decided of `ask`. A pick that comes too late is told that its request was aborted. Raises
        ValueError for a verdict that cannot be carried out; another may be given then.
        """
        told = Told(verdict.watch) if isinstance(verdict, Pick) else None
        try:
            if self._request is not _Request.DECIDING:
                return []
            if isinstance(verdict, Refusal):
                return self._refuse(verdict)
            answers = self._send(verdict)
            self.ask, self._request = None, _Request.SENT
            self._told, self._rename, told = told, verdict.rename, None
            self._hide_headers, self._add_headers = verdict.hide_headers, verdict.add_headers
            self._served_header = verdict.served_header
            self._holds = verdict.recall is not None and self._response_bodies.streamed
        finally:
            if told is not None:
                told.aborted()
        if self._told is not None and not self._sees_responses:
            self._told.unseen()
        while self._later:
            answers += self.feed(self._later.popleft())
        return answers

    def take_back(self, refusal: Refusal) -> Answers:
        """Refuse what was sent on, in place of its response. Empty: that has begun, or the stream is over."""
        told = self._told
        if told is None or told.over or self._response not in (_Response.HEAD, _Response.HELD):
            return []
        told.recalled()
        return self._refuse(refusal)

    def close(self) -> None:
        """The stream is over. May be called in any state, and twice."""
        if self._told is not None:
            if self._response is _Response.HEAD and not self._response_bodies.ends_seen:
                self._told.unseen()
            self._told.aborted()
        self.ask, self._parts = None, []
        self._request, self._response = _Request.DROPPED, _Response.REFUSED

    def _agree(self, message: pb.ProcessingRequest) -> _Bodies:
        modes = pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED
        if message.HasField("protocol_config"):
            modes = message.protocol_config.request_body_mode, message.protocol_config.response_body_mode
        if modes[0] not in _REQUEST_BODIES or modes[1] not in _RESPONSE_BODIES:
            raise ProtocolError("bodies in modes {} and {}".format(*modes))
        self._response_bodies = _RESPONSE_BODIES[modes[1]]
        return _REQUEST_BODIES[modes[0]]

    @property
    def _bodies(self) -> _Bodies:
        return self._request_bodies or _Bodies()

    # The request.

    def _request_head(self, message: pb.ProcessingRequest) -> Answers:
        self._head = wire.head_of(message.request_headers.headers)
        self._hear_subset(message)
        self._whole = message.request_headers.end_of_stream
        self._is_tunnel = not self._whole and _is_tunnel(self._head)
        self._has_body = not self._whole and not self._is_tunnel
        if self._is_tunnel and self._bodies.at_once:
            return self._refuse(endless())
        if not self._has_body or not self._bodies.shown:
            return self._ask(blind=self._has_body)
        self._request, self._answered_by = _Request.BODY, _REQUEST_BODY
        if not self._bodies.streamed:
            return [wire.unchanged(_REQUEST_HEAD)]
        self._answered_by = _REQUEST_HEAD
        return self._ask() if self._head.content_length == 0 else []

    def _request_body(self, message: pb.ProcessingRequest) -> Answers:
        part = message.request_body
        self._hear_subset(message)
        self._whole, self._last_part = part.end_of_stream, part.body
        self._size += len(part.body)
        if self._size <= self._max_body_bytes:
            self._parts.append(part.body)
        elif self._size > 2 * self._max_body_bytes:
            return self._refuse(too_large(self._max_body_bytes))
        if self._bodies.at_once:
            return self._ask(blind=not (self._whole or self._bodies.ends_seen))
        return self._ask() if self._whole or self._size == self._head.content_length else []

    def _request_trailers(self, message: pb.ProcessingRequest) -> Answers:
        if self._bodies.at_once:
            raise ProtocolError("request_trailers in place of the body")
        self._hear_subset(message)
        self._later.append(message)
        return self._ask()

    def _more_while_deciding(self, message: pb.ProcessingRequest) -> Answers:
        if self._is_tunnel or not message.HasField(_REQUEST_BODY):
            self._size += len(message.request_body.body)
            if self._size > self._max_body_bytes:
                return self._refuse(too_large(self._max_body_bytes))
            self._later.append(message)
        elif not self._bodies.streamed:
            self._later.append(_SOME_BODY)  # It is only to be answered; what it holds need not be kept.
        elif self._is_news(message.request_body):
            self._whole = message.request_body.end_of_stream
        return []

    def _rest_of_request(self, message: pb.ProcessingRequest) -> Answers:
        if not self._bodies.streamed:
            return [wire.unchanged(_REQUEST_BODY)]
        if self._is_tunnel:
            return [wire.streamed_request(message.request_body.body, message.request_body.end_of_stream)]
        if not self._is_news(message.request_body):
            return []
        self._whole = message.request_body.end_of_stream
        return [wire.streamed_request(b"", self._whole)]

    def _is_news(self, part: pb.HttpBody) -> bool:
        """Of a body of which all bytes are there. Envoys since 1.35 may send the last part twice (envoy#46237)."""
        if not self._whole and part.body not in (b"", self._last_part):
            raise ProtocolError("request_body after the body's end")
        return not self._whole

    def _rest_trailers(self, message: pb.ProcessingRequest) -> Answers:
        return [wire.unchanged("request_trailers")]

    def _hear_subset(self, message: pb.ProcessingRequest) -> None:
        subset = wire.subset_of(message)
        self._subset = self._subset if subset is None else subset

    def _ask(self, blind: bool = False) -> Answers:
        if self._size > self._max_body_bytes:
            return self._refuse(too_large(self._max_body_bytes))
        if self._subset == ():
            return self._refuse(none_allowed())
        self._request = _Request.DECIDING
        self.ask = Ask(
            method=self._head.pseudo.get(":method", ""),
            path=self._head.pseudo.get(":path", ""),
            headers=wire.without_owned(self._head.headers),
            body=b"" if blind else b"".join(self._parts),
            blind=blind,
            subset=self._subset,
        )
        return []

    def _send(self, pick: Pick) -> Answers:
        body, length = pick.body, None
        if body is not None:
            if self.ask is None or self.ask.blind or not self._has_body:
                raise ValueError("a body for a request that has none, or none that is seen")
            length = None if self._head.content_length is None else len(body)
        message = pb.ProcessingResponse()
        head_or_body = message.request_headers if self._answered_by == _REQUEST_HEAD else message.request_body
        common = head_or_body.response
        wire.route(message, common, pick, length)
        answers = [message]
        if not self._bodies.streamed:
            if body is not None:
                common.body_mutation.body = body
        elif self._has_body:
            body = b"".join(self._parts) if body is None else body
            parts = list(wire.chunks(body)) if body or self._whole else []
            answers += [wire.streamed_request(part, False) for part in parts[:-1]]
            answers += [wire.streamed_request(part, self._whole) for part in parts[-1:]]
        self._parts = []
        return answers

    def _refuse(self, refusal: Refusal) -> Answers:
        answer = wire.immediate(refusal)
        self.ask, self._parts = None, []
        self._request, self._response = _Request.DROPPED, _Response.REFUSED
        return [answer]

    def _ignored(self, message: pb.ProcessingRequest) -> Answers:
        return []

    # The response.

    def _response_head(self, message: pb.ProcessingRequest) -> Answers:
        if not self.decided:  # The proxy has answered by itself.
            self.ask, self._parts, self._request = None, [], _Request.DROPPED
        head = wire.head_of(message.response_headers.headers)
        status = head.pseudo.get(":status", "")
        if not (status.isascii() and status.isdigit() and len(status) == 3):
            raise ProtocolError("response_headers without a status")
        ends = message.response_headers.end_of_stream
        may_hold = self._holds and self._response is _Response.HEAD and not ends
        if may_hold and status[0] == "2" and _is_stream(head.headers):
            self._response, self._held = _Response.HELD, message
            return []
        answer = wire.unchanged("response_headers")
        self._response = _Response.OVER if ends else _Response.BODY
        if self._told is None:
            return [answer]
        self._told.responded(int(status), head.headers, wire.served_of(message))
        if self._served_header is not None:
            added = {**self._add_headers, self._served_header: wire.served_or_why(message)}
            wire.change_response(answer, self._hide_headers, added)
        elif self._hide_headers or self._add_headers:
            wire.change_response(answer, self._hide_headers, self._add_headers)
        if ends:
            self._told.ended()
        elif not self._response_bodies.ends_seen and not self._response_bodies.at_once:
            self._told.unseen()
        elif self._rename is not None and _can_rename(head.headers):
            self._renamer = Renamer(*self._rename)
            self._tells_length = head.content_length is not None
            if not self._response_bodies.at_once:
                wire.without_content_length(answer)
        return [answer]

    def _without_head(self, message: pb.ProcessingRequest) -> Answers:
        """Bodies are shown and heads are not (response_header_mode: SKIP). Of what status or kind it is nobody says, so
        that nothing of it can be learned, or changed.
        """
        if not self.decided:
            raise ProtocolError(f"{message.WhichOneof('request')} before anything is decided")
        if self._told is not None:
            self._told.unseen()
        self._response = _Response.BODY
        return self.feed(message)

    def _after_head(self, message: pb.ProcessingRequest) -> Answers:
        """What comes first of a response whose head was held."""
        head, self._held = self._held, None
        assert head is not None  # noqa: S101 - it is what the state says
        return [*self._response_head(head), *self.feed(message)]

    def _response_body(self, message: pb.ProcessingRequest) -> Answers:
        data, ends = message.response_body.body, message.response_body.end_of_stream
        bodies = self._response_bodies
        whole = ends or (bodies.at_once and bodies.ends_seen)
        if self._told is not None:
            self._told.chunk(data)
            if whole:
                self._told.ended()
        if whole:
            self._response = _Response.OVER
        out = data if self._renamer is None else self._renamer.feed(data, whole)
        if bodies.streamed:
            return [wire.streamed_response(out, ends)] if out or ends or not data else []
        if out is data:
            return [wire.unchanged("response_body")]
        return [wire.replaced_body(out, bodies.at_once and self._tells_length)]

    def _response_trailers(self, message: pb.ProcessingRequest) -> Answers:
        self._response = _Response.OVER
        if self._told is not None:
            self._told.ended()
        answers = [wire.unchanged("response_trailers")]
        held = b"" if self._renamer is None else self._renamer.feed(b"", True)
        if held and not self._response_bodies.streamed:
            raise ProtocolError("response_trailers in the middle of a model's name")
        return [wire.streamed_response(held, False), *answers] if held else answers


def _is_tunnel(head: wire.Head) -> bool:
    method = head.pseudo.get(":method")
    return method == "CONNECT" or (method == "GET" and head.headers.get("upgrade", "").lower() == "websocket")


def _is_stream(headers: CIMultiDict[str]) -> bool:
    return headers.get("content-type", "").startswith("text/event-stream")


def _can_rename(headers: CIMultiDict[str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind in _RENAMED_TYPES and headers.get("content-encoding", "identity").lower() == "identity"


_REQUEST_HEAD, _REQUEST_BODY = "request_headers", "request_body"
_SOME_BODY = pb.ProcessingRequest(request_body=pb.HttpBody())
_OF_RESPONSES = frozenset({"response_headers", "response_body", "response_trailers"})

_HANDLERS: dict[tuple[_State, str], Callable[[Session, pb.ProcessingRequest], Answers]] = {
    (_Request.HEAD, "request_headers"): Session._request_head,
    (_Request.BODY, "request_body"): Session._request_body,
    (_Request.BODY, "request_trailers"): Session._request_trailers,
    (_Request.DECIDING, "request_body"): Session._more_while_deciding,
    (_Request.DECIDING, "request_trailers"): Session._more_while_deciding,
    (_Request.SENT, "request_body"): Session._rest_of_request,
    (_Request.SENT, "request_trailers"): Session._rest_trailers,
    (_Request.DROPPED, "request_headers"): Session._ignored,
    (_Request.DROPPED, "request_body"): Session._ignored,
    (_Request.DROPPED, "request_trailers"): Session._ignored,
    (_Response.HEAD, "response_headers"): Session._response_head,
    (_Response.HEAD, "response_body"): Session._without_head,
    (_Response.HEAD, "response_trailers"): Session._without_head,
    (_Response.HELD, "response_body"): Session._after_head,
    (_Response.HELD, "response_trailers"): Session._after_head,
    (_Response.BODY, "response_body"): Session._response_body,
    (_Response.BODY, "response_trailers"): Session._response_trailers,
    (_Response.OVER, "response_trailers"): Session._response_trailers,
    (_Response.REFUSED, "response_headers"): Session._ignored,
    (_Response.REFUSED, "response_body"): Session._ignored,
    (_Response.REFUSED, "response_trailers"): Session._ignored,
}
