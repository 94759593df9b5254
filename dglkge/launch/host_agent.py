"""The launcher's agent on a machine: answers questions, does small work, and holds the machine for the job.

stdin has one JSON object per line, ``{"id": number, "do": name of a task, ...arguments}``; an empty line only
says that the launcher is there. stdout answers each with its id and ``ok`` or ``error``. At the end of
stdin, or after SILENCE_SECONDS without a line, the agent leaves, and with it the lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dglkge.errors import DglkgeError
from dglkge.launch import host_files, host_tasks, run_copies
from dglkge.launch.job_lock import clear_machine, hold_machine
from dglkge.launch.keeper import SILENCE_SECONDS
from dglkge.launch.shared_memory import segment_names

TASKS: Mapping[str, Callable[..., Any]] = {
    "describe": host_tasks.describe_machine,
    "check": host_tasks.check_machine,
    "choose_master_port": host_tasks.choose_master_port,
    "write_job_files": host_tasks.write_job_files,
    "clean_up": host_tasks.clean_up,
    "list_files": host_files.list_files,
    "stale_files": host_files.stale_files,
    "make_staging": host_files.make_staging,
    "place_folder": host_files.place_folder,
    "place_files": host_files.place_files,
    "describe_copy": run_copies.describe_copy,
    "note_origin": run_copies.note_origin,
    "hold_version": run_copies.hold_version,
    "drop_hold": run_copies.drop_hold,
}


def serve(requests: int, answers: int) -> None:
    """Answer until the launcher is gone.

    Parameters
    ----------
    requests, answers : int
        File descriptors.
    """
    pending = b""
    is_held = False

    def lock() -> list[str]:
        """Hold the machine, or clear what the attempt before has left; return the segments that stay."""
        nonlocal is_held
        if is_held:
            clear_machine()
        else:
            held.enter_context(hold_machine())
            is_held = True
        return sorted(segment_names())

    with contextlib.ExitStack() as held:
        tasks = {**TASKS, "lock": lock}
        while select.select([requests], [], [], SILENCE_SECONDS)[0]:
            try:
                data = os.read(requests, 65536)
            except OSError:  # the connection was reset
                return
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in filter(None, lines):
                answer = json.dumps(_answer(tasks, json.loads(line))).encode() + b"\n"
                while answer:
                    answer = answer[os.write(answers, answer) :]


def _answer(tasks: Mapping[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Do one task."""
    name, number = request.pop("do"), request.pop("id")
    try:
        return {"id": number, "ok": tasks[name](**request)}
    except DglkgeError as error:
        return {"id": number, "error": str(error)}
    except Exception as error:
        return {"id": number, "error": f"{name} failed: {error!r}"}


def main() -> None:
    """Serve the launcher over stdin and stdout; what anything here prints goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(0, answers)
    sys.exit(0)


if __name__ == "__main__":
    main()
