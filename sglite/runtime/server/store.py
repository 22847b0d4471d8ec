"""Files and batches on disk: rows in SQLite, contents in files beside it. Every state change is one transaction.

A Store is used from many threads and by one process: a lock on its folder keeps a second server out.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple

from sglite.errors import ConfigError, NotFoundError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, created INTEGER NOT NULL, shown TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    sort_key TEXT NOT NULL, ok INTEGER, output TEXT, PRIMARY KEY (batch, number)) WITHOUT ROWID;
"""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
Shown = dict[str, Any]
"""A file or batch as OpenAI's API shows it."""


class Line(NamedTuple):
    """Where a request stands in its batch's input file, and text by which similar prompts sort together."""

    number: int
    offset: int
    length: int
    sort_key: str


class Store:
    """Raises ConfigError where the folder cannot be used, NotFoundError for what an owner does not have."""

    def __init__(self, folder: Path) -> None:
        self._contents = folder / "files"
        try:
            self._contents.mkdir(parents=True, exist_ok=True)
            self._lock_file = _locked(folder / "lock")
            self._connection = sqlite3.connect(folder / "state.sqlite", check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot keep files and batches in {folder}: {error}; choose another data-folder"
            ) from None
        self._lock = threading.Lock()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._connection.close()
            self._lock_file.close()

    # ---- files

    def add_file(self, owner: str, name: str, purpose: str, content: IO[bytes]) -> Shown:
        file_id = f"file-{uuid.uuid4().hex}"
        with self._new_content(file_id) as out:
            shutil.copyfileobj(content, out)
        return self._register(file_id, owner, name, purpose)

    def write_file(self, file_id: str, owner: str, name: str, purpose: str, lines: Iterable[str]) -> Shown:
        """Like ``add_file`` with an id chosen before; writing it again changes nothing."""
        with self._new_content(file_id) as out:
            for line in lines:
                out.write(line.encode() + b"\n")
        return self._register(file_id, owner, name, purpose)

    def file(self, owner: str, file_id: str) -> Shown:
        rows = self._rows("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        if not rows:
            raise NotFoundError(f"no file {file_id!r:.80}", param="file_id")
        return _shown_file(rows[0])

    def files(self, owner: str, purpose: str | None) -> list[Shown]:
        """The newest first."""
        rows = self._rows("SELECT * FROM files WHERE owner = ? ORDER BY created DESC, rowid DESC", owner)
        return [_shown_file(row) for row in rows if purpose in (None, row[3])]

    def content(self, owner: str, file_id: str) -> Path:
        return self._contents / str(self.file(owner, file_id)["id"])

    def delete_file(self, owner: str, file_id: str) -> None:
        path = self.content(owner, file_id)
        self._run("DELETE FROM files WHERE id = ?", file_id)
        path.unlink(missing_ok=True)

    # ---- batches

    def add_batch(self, owner: str, batch: Shown) -> None:
        values = (batch["id"], owner, batch["status"], batch["created_at"], json.dumps(batch))
        self._run("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", *values)

    def save_batch(self, batch: Shown) -> None:
        self._run(
            "UPDATE batches SET status = ?, shown = ? WHERE id = ?", batch["status"], json.dumps(batch), batch["id"]
        )

    def batch(self, owner: str, batch_id: str) -> Shown:
        rows = self._rows("SELECT shown FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if not rows:
            raise NotFoundError(f"no batch {batch_id!r:.80}", param="batch_id")
        return self._counted(json.loads(rows[0][0]))

    def batches(self, owner: str) -> list[Shown]:
        """The newest first."""
        rows = self._rows("SELECT shown FROM batches WHERE owner = ? ORDER BY created DESC, rowid DESC", owner)
        return [self._counted(json.loads(row[0])) for row in rows]

    def unfinished(self) -> list[tuple[str, Shown]]:
        """Owners and batches that a server which ended left behind, the oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        rows = self._rows(f"SELECT owner, shown FROM batches WHERE status IN ({marks}) ORDER BY created", *UNFINISHED)
        return [(owner, json.loads(shown)) for owner, shown in rows]

    # ---- the lines of a batch

    def set_lines(self, batch_id: str, lines: Sequence[Line]) -> None:
        with self._lock, self._transaction():
            self._connection.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            self._connection.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, NULL, NULL)", ((batch_id, *line) for line in lines)
            )

    def pending(self, batch_id: str) -> list[Line]:
        """The lines without a result, similar prompts together."""
        query = "SELECT number, offset, length, sort_key FROM lines WHERE batch = ? AND ok IS NULL"
        return [Line(*row) for row in self._rows(query + " ORDER BY sort_key, number", batch_id)]

    def finish_line(self, batch_id: str, number: int, ok: bool, output: str) -> None:
        """Keep a line's result, unless it has one."""
        self._run(
            "UPDATE lines SET ok = ?, output = ? WHERE batch = ? AND number = ? AND ok IS NULL",
            ok,
            output,
            batch_id,
            number,
        )

    def outputs(self, batch_id: str, *, ok: bool) -> list[str]:
        rows = self._rows("SELECT output FROM lines WHERE batch = ? AND ok = ? ORDER BY number", batch_id, ok)
        return [row[0] for row in rows]

    # ---- inside

    def _counted(self, batch: Shown) -> Shown:
        query = "SELECT count(*), coalesce(sum(ok), 0), coalesce(sum(NOT ok), 0) FROM lines WHERE batch = ?"
        total, completed, failed = self._rows(query, batch["id"])[0]
        return {**batch, "request_counts": {"total": total, "completed": completed, "failed": failed}}

    @contextmanager
    def _new_content(self, file_id: str) -> Iterator[IO[bytes]]:
        """A file that is there whole or not at all."""
        part = self._contents / f"{file_id}.part"
        try:
            with part.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            part.rename(self._contents / file_id)
        finally:
            part.unlink(missing_ok=True)

    def _register(self, file_id: str, owner: str, name: str, purpose: str) -> Shown:
        size = (self._contents / file_id).stat().st_size
        values = (file_id, owner, name, purpose, size, int(time.time()))
        self._run("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", *values)
        return self.file(owner, file_id)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _run(self, statement: str, *values: Any) -> None:
        with self._lock:
            self._connection.execute(statement, values)

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()


def _shown_file(row: Sequence[Any]) -> Shown:
    file_id, _, name, purpose, size, created = row
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": created,
        "expires_at": None,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _locked(path: Path) -> IO[str]:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OSError("another server uses it") from None
    return file


def open_store(folder: str) -> AbstractContextManager[Store | None]:
    """The store in a folder; none where no folder is given."""
    return Store(Path(folder)) if folder else nullcontext()


def page(items: Sequence[Mapping[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A page of a list, as OpenAI's API cuts it. Raises NotFoundError when ``after`` names none of the items."""
    start = 0
    if after is not None:
        known = [item["id"] for item in items]
        if after not in known:
            raise NotFoundError(f"no {after!r:.80} in this list", param="after")
        start = known.index(after) + 1
    shown = items[start : start + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(shown), "has_more": start + limit < len(items), **ends}
