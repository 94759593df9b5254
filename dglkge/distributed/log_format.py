"""Log lines as JSON: one object a line with ``time``, ``level``, ``process`` and ``message``.

The launcher writes them with ``--log_format json``, for itself and for lines of processes that are not JSON.
Processes write them if ``DGLKGE_LOG_FORMAT`` is ``json``. Standard library only: the launcher imports it.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from typing import Any

VARIABLE = "DGLKGE_LOG_FORMAT"
TEXT, JSON = "text", "json"
LOG_FORMATS = (TEXT, JSON)

FIELDS = ("time", "level", "process", "message")


def timestamp(seconds: float | None = None) -> str:
    """Return seconds since the epoch, by default now, in UTC with milliseconds (RFC 3339).

    Examples
    --------
    >>> timestamp(0.25)
    '1970-01-01T00:00:00.250Z'
    """
    moment = datetime.datetime.fromtimestamp(
        time.time() if seconds is None else seconds, datetime.timezone.utc
    )
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(process: str, level: str, message: str, seconds: float | None = None, **more: Any) -> str:
    """Return one line, without its end; `more` are further fields, `seconds` since the epoch, by default now.

    Examples
    --------
    >>> json_line("trainer 0", "info", "resumed", 0.0)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "process": "trainer 0", "message": "resumed"}'
    """
    record = dict(zip(FIELDS, (timestamp(seconds), level, process, message)))
    return json.dumps({**record, **more}, ensure_ascii=False)


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the object of a line that has all of :data:`FIELDS` as texts; None for any other line."""
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in FIELDS):
        return None
    return record


class JsonFormatter(logging.Formatter):
    """Formats log records as :func:`json_line` of a process, with the logger as a further field."""

    def __init__(self, process: str) -> None:
        super().__init__("%(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        # The base class appends the traceback to the message.
        text = super().format(record)
        return json_line(self._process, record.levelname.lower(), text, record.created, logger=record.name)
