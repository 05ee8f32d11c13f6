"""The file that keeps what was learned: round trip, files that cannot be used, places that cannot be written."""

import asyncio
import inspect
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import learned
from gateway.config.schema import LearningConfig
from gateway.learned import VERSION, LearnedFile, learned_path
from scorer.calibrate import Calibration, Part
from scorer.kind import EngineKind
from tests.support.gateway_world import until


def taught(n: int = 60) -> Calibration:
    calibration = Calibration()
    calibration.meet("a", EngineKind(model="m", kv_blocks=100))
    for _ in range(n):
        calibration.add(Part.WORK, "a", 1.0, 2.0)
    return calibration


def life(path: Path | None, calibration: Calibration, learn: Callable[[], Any] | None = None) -> LearnedFile:
    """Started and closed, while `learn` happens."""

    async def run() -> LearnedFile:
        file = LearnedFile(None if path is None else str(path), calibration)
        file.start()
        try:
            if learn is not None and inspect.isawaitable(found := learn()):
                await found
        finally:
            await file.close()
        return file

    return asyncio.run(run())


def one_more(calibration: Calibration) -> None:
    calibration.add(Part.WORK, "a", 1.0, 2.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learned.json"


def test_what_one_life_learned_the_next_one_knows(path: Path) -> None:
    before = taught()
    file = life(path, before)
    assert file.problem is None
    after = Calibration()
    file = life(path, after)
    assert (file.loaded, after.state()) == (2, before.state())
    assert after.value(Part.WORK, "a") == pytest.approx(2.0)
    assert after.meet("a", EngineKind(model="other"))


def test_it_is_ours_alone_and_nothing_is_left_beside_it(path: Path) -> None:
    life(path, taught())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_nothing_new_writes_nothing(path: Path) -> None:
    life(path, Calibration())
    assert not path.exists()
    life(path, taught())
    written = path.stat().st_mtime_ns, path.stat().st_ino
    life(path, Calibration())
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written


def test_it_is_written_while_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "_SAVE_S", 0.01)
    calibration = Calibration()

    async def learn() -> None:
        one_more(calibration)
        await until(path.exists)

    life(path, calibration, learn)
    assert "work" in json.loads(path.read_text())["factors"]


def test_a_link_stays_a_link(path: Path) -> None:
    target = path.parent / "elsewhere.json"
    target.write_text("")
    path.symlink_to(target)
    file = life(path, taught())
    assert file.problem is None
    assert path.is_symlink()
    assert (life(path, Calibration())).loaded == 2


OLD = json.dumps({"warmroute_learned_version": VERSION - 1, "factors": {}})
NEWER = json.dumps({"warmroute_learned_version": VERSION + 1, "factors": {}})
DAMAGED = json.dumps({"warmroute_learned_version": VERSION, "factors": {"work": {"a": [0.1]}}})[:-9]


@pytest.mark.parametrize(("content", "says"), [(OLD, "another format"), (DAMAGED, "damaged")])
def test_ours_that_cannot_be_read_is_told_and_written_anew(
    path: Path, caplog: pytest.LogCaptureFixture, content: str, says: str
) -> None:
    path.write_text(content)
    calibration = Calibration()
    file = life(path, calibration)
    assert file.loaded == 0
    assert says in str(file.problem)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in warning
    assert path.read_text() == content
    assert life(path, calibration, lambda: one_more(calibration)).problem is None
    assert (life(path, Calibration())).loaded == 2


FOREIGN = ["[1]", "null", "not json", '{"apiVersion": "v1"}', '{"a": ' * 5000, "\x00\x01", '{"factors": {}}', NEWER]


@pytest.mark.parametrize("content", FOREIGN)
def test_files_of_others_are_told_and_left_as_they_are(
    path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path.write_text(content)
    calibration = Calibration()
    file = life(path, calibration, lambda: one_more(calibration))
    assert "move it away" in str(file.problem)
    assert str(path) in caplog.text
    assert path.read_text() == content


@pytest.mark.parametrize("entries", [{"work": {"a": [1]}}, {"luck": {}}, {"work": {"a": None, "b": "x"}}])
def test_entries_that_cannot_be_read_are_told(
    path: Path, caplog: pytest.LogCaptureFixture, entries: dict[str, Any]
) -> None:
    path.write_text(json.dumps({"factors": entries, "warmroute_learned_version": VERSION}, indent=2))
    file = life(path, Calibration())
    assert (file.loaded, file.problem) == (0, None)
    assert f"{path}: " in caplog.text
    assert "left out" in caplog.text


def test_a_pipe_or_a_folder_does_not_hold_it_up(path: Path) -> None:
    os.mkfifo(path)
    assert "no regular file" in str((life(path, taught())).problem)
    assert "no regular file" in str((life(path.parent, taught())).problem)


def test_a_place_that_cannot_be_written_is_told_at_the_start_and_stops_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = path.parent / "none" / "learned.json"
    calibration = Calibration()
    file = life(nowhere, calibration)
    assert f"{nowhere.parent} cannot be written to (No such file" in str(file.problem)
    file = life(nowhere, calibration, lambda: one_more(calibration))
    assert "cannot be written" in str(file.problem)
    assert not nowhere.exists()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_failed_write_leaves_the_last_good_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life(path, taught())
    good = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    calibration = taught(90)
    file = life(path, calibration, lambda: one_more(calibration))
    assert "No space left" in str(file.problem)
    assert path.read_bytes() == good
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("file", "env", "where"),
    [
        ("/x/y", {"STATE_DIRECTORY": "/var/lib/w"}, "/x/y"),
        (None, {"STATE_DIRECTORY": "/var/lib/w:/var/lib/other"}, "/var/lib/w/learned.json"),
        (None, {"STATE_DIRECTORY": ""}, None),
        (None, {}, None),
    ],
)
def test_where_it_is_kept(file: str | None, env: dict[str, str], where: str | None) -> None:
    assert learned_path(LearningConfig(file=file), env) == where


def test_without_a_file_nothing_is_kept_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = life(None, taught())
    assert file.problem is None
    assert "learning.file" in caplog.text
