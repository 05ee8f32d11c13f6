"""Forms put together from parts: the fields found are those that were put in, whatever the files among them say."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.form import WINDOW_BYTES, fields

BOUNDARY = b"bound-1"
NASTY = [
    b"\r\n", b"--", BOUNDARY, b"\r\n--" + BOUNDARY[:-1], b"--" + BOUNDARY, b"\r\n--" + BOUNDARY + b"x", b"\r\n\r\n",
    b'Content-Disposition: form-data; name="model"', b"\r\n--other\r\n", b"model", b"\0", b"\xff" * 40_000, b"a",
]  # fmt: skip
DELIMITER = b"\r\n--" + BOUNDARY


def is_content(value: bytes) -> bool:
    """Nothing in it, or across its end, is a delimiter line."""
    whole = b"\r\n" + value + DELIMITER
    return DELIMITER + b"\r\n" not in whole and DELIMITER + b"--" not in whole


content = st.lists(st.sampled_from(NASTY), max_size=6).map(b"".join).filter(is_content)
names = st.sampled_from(["model", "stream", "file", "language"])
parts = st.lists(st.tuples(names, st.booleans(), content, st.booleans()), max_size=6)


def form(given_parts: list[tuple[str, bool, bytes, bool]]) -> bytes:
    out = b""
    for name, is_file, value, is_quoted in given_parts:
        shown = f'"{name}"' if is_quoted else name
        head = f"Content-Disposition: form-data; name={shown}" + ('; filename="a; name=model"' if is_file else "")
        out += b"--" + BOUNDARY + b"\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"
    return out + b"--" + BOUNDARY + b"--\r\n"


@given(parts)
def test_the_fields_found_are_those_put_in(given_parts: list[tuple[str, bool, bytes, bool]]) -> None:
    body = form(given_parts)
    wanted = frozenset({"model", "stream"})
    found = fields(f'multipart/form-data; boundary="{BOUNDARY.decode()}"', body, wanted)
    put_in: dict[str, str] = {}
    for name, is_file, value, _ in given_parts:
        if name in wanted and not is_file:
            put_in[name] = value.decode("utf-8", "replace")
    if len(body) <= 2 * WINDOW_BYTES:
        assert found == put_in
    else:  # Between the two ends nothing is looked for; what is found is a field all the same.
        every = {(name, value.decode("utf-8", "replace")) for name, is_file, value, _ in given_parts if not is_file}
        assert set(found.items()) <= every


@given(st.binary(max_size=400), st.text(max_size=40))
def test_no_bytes_are_too_odd(body: bytes, content_type: str) -> None:
    fields(content_type, body, frozenset({"model"}))
    fields("multipart/form-data; boundary=b", b"--b\r\n" + body + b"\r\n--b\r\n", frozenset({"model"}))
