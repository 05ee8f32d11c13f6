"""The model field of multipart bodies: found where it is a field, and nowhere else."""

import pytest

from gateway.form import WINDOW_BYTES, fields, with_field

BIG = b"\0\xff" * WINDOW_BYTES
NAMES = frozenset({"model", "stream"})


def part(head: bytes, value: bytes) -> bytes:
    return b"--B\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


def field(name: bytes, value: bytes) -> bytes:
    return part(b'Content-Disposition: form-data; name="' + name + b'"', value)


def file(content: bytes, name: bytes = b"file") -> bytes:
    return part(
        b'Content-Disposition: form-data; name="' + name + b'"; filename="a.wav"\r\nContent-Type: audio/wav', content
    )


def model(*parts: bytes, content_type: str = "multipart/form-data; boundary=B") -> str | None:
    return fields(content_type, b"".join(parts) + b"--B--\r\n", NAMES).get("model")


MODEL = field(b"model", b"whisper")
LANGUAGE = field(b"language", b"en")


@pytest.mark.parametrize(
    "parts",
    [
        (MODEL, file(BIG)),
        (file(BIG), MODEL),
        (file(BIG), LANGUAGE, MODEL, LANGUAGE),
        (LANGUAGE, MODEL, file(BIG), LANGUAGE),
        (MODEL, file(b"")),
        (b"preamble\r\n", MODEL),
    ],
    ids=["first", "last", "in the middle after the file", "before the file", "empty file", "preamble"],
)
def test_it_is_found_wherever_it_stands(parts: tuple[bytes, ...]) -> None:
    assert model(*parts) == "whisper"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Disposition: form-data; name=model",
        b'content-disposition:form-data;name="model"',
        b'CONTENT-DISPOSITION : Form-Data ; NAME = "model"',
        b'Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="model"',
        b'Content-Disposition: form-data; x="; name=no; "; name="model"',
        b'Content-Disposition: form-data; name="mod\\el"',
    ],
)
def test_however_it_is_written(head: bytes) -> None:
    assert model(part(head, b"whisper"), file(BIG)) == "whisper"


@pytest.mark.parametrize(
    "parts",
    [
        (file(b'x\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n'),),
        (file(b'x\r\n--BB\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n'),),
        (file(b'x --B\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n'),),
        (file(BIG + b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil'),),
        (file(BIG + b'\r\n--BX\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil'),),
        (file(b"evil", name=b"model"),),
        (part(b'Content-Disposition: form-data; name="x"; filename="; name=model"', b"evil"),),
        (part(b'Content-Disposition: form-data; name="x; name=model"', b"evil"),),
        (part(b'Content-Disposition: form-data; filename*=utf-8\'\'a; name="model"', b"evil"),),
        (part(b'Content-Disposition: attachment; name="model"', b"evil"),),
        (part(b'X-Content-Disposition: form-data; name="model"', b"evil"),),
        (part(b'Content-Type: text/plain\r\n\r\nContent-Disposition: form-data; name="model"', b"evil"),),
        (b'--B\r\n\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n',),
        (b'--B\r\nContent-Disposition: form-data; name="model"\r\n',),
    ],
)  # fmt: skip
def test_what_looks_like_it_is_none(parts: tuple[bytes, ...]) -> None:
    assert model(*parts) is None


def test_a_line_of_the_value_that_begins_like_the_boundary_ends_nothing() -> None:
    assert model(field(b"model", b"a\r\n--BB")) == "a\r\n--BB"


def test_the_last_one_counts_as_for_engines() -> None:
    assert model(field(b"model", b"one"), file(BIG), field(b"model", b"two")) == "two"
    assert model(field(b"model", b"one"), field(b"model", b"two"), file(BIG)) == "two"


def test_one_cut_by_the_end_of_what_is_looked_at_is_not_guessed() -> None:
    assert model(field(b"model", b"w" * 2 * WINDOW_BYTES), file(BIG)) is None


@pytest.mark.parametrize(
    ("content_type", "found"),
    [
        ('multipart/form-data; boundary="B"', "whisper"),
        ("multipart/form-data;charset=utf-8;BOUNDARY=B", "whisper"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/form-data; boundary=other", None),
        (f"multipart/form-data; boundary={'B' * 5000}", None),
    ],
)
def test_the_boundary_is_the_headers(content_type: str, found: str | None) -> None:
    assert model(MODEL, content_type=content_type) == found


@pytest.mark.parametrize("body", [b"", b"--B", b"--B\r\n", b"--B--", b"\r\n--B\r\n\r\n", b"\r\n" * 1000])
def test_rubbish_names_nothing(body: bytes) -> None:
    assert fields("multipart/form-data; boundary=B", body, NAMES) == {}


@pytest.mark.parametrize("big", [b"RIFF", BIG, b"\r\n--B\r\n"[:-3] + b"model"])
@pytest.mark.parametrize("value", ["w", "a-longer-name-than-before", "é\u20ac"])
def test_another_value_takes_the_place_of_each_found_and_nothing_else_moves(big: bytes, value: str) -> None:
    kind = "multipart/form-data; boundary=B"
    asks = file(b'name="model"' + big, b"model")
    body = MODEL + asks + LANGUAGE + MODEL + b"--B--\r\n"
    new = field(b"model", value.encode())
    assert with_field(kind, body, "model", value) == new + asks + LANGUAGE + new + b"--B--\r\n"
    assert fields(kind, with_field(kind, body, "model", value), NAMES) == {"model": value}
    assert with_field("multipart/form-data", body, "model", value) == body
    assert with_field(kind, body, "absent", value) == body


def test_a_value_that_would_end_its_part_is_refused() -> None:
    with pytest.raises(ValueError, match="end its part"):
        with_field("multipart/form-data; boundary=B", MODEL, "model", "a\r\n--B--")
