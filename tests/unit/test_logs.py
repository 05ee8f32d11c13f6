"""Lines of our own log."""

import io
import logging
import time

import msgspec
import pytest

from gateway.logs import _JsonLines
from gateway.proxy.access import AccessLog, Record


def test_what_is_no_utf8_is_shown_as_escapes_and_loses_no_line() -> None:
    record = logging.LogRecord("gateway.x", logging.WARNING, __file__, 1, "target %s", ("10.\udce9",), None)
    line = msgspec.json.decode(_JsonLines().format(record))
    assert line["message"] == "target 10.\\udce9"
    assert (line["level"], line["logger"]) == ("warning", "gateway.x")


def test_times_of_json_lines_have_one_form_and_a_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector reads both kinds of line by one rule, whatever the host's zone."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        record = logging.LogRecord("gateway.x", logging.WARNING, __file__, 1, "hello", None, None)
        record.created = 1_700_000_000.25
        ours = msgspec.json.decode(_JsonLines().format(record))["time"]
    finally:
        monkeypatch.undo()
        time.tzset()
    request = Record(request_id="1", method="GET", path="/", status=200)
    access = msgspec.json.decode(AccessLog("json", io.StringIO())._line(record.created, request))["time"]
    assert ours == access == "2023-11-14T22:13:20.250+00:00"
