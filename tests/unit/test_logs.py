"""Lines of our own log."""

import logging

import msgspec

from gateway.logs import _JsonLines


def test_what_is_no_utf8_is_shown_as_escapes_and_loses_no_line() -> None:
    record = logging.LogRecord("gateway.x", logging.WARNING, __file__, 1, "target %s", ("10.\udce9",), None)
    line = msgspec.json.decode(_JsonLines().format(record))
    assert line["message"] == "target 10.\\udce9"
    assert (line["level"], line["logger"]) == ("warning", "gateway.x")
