"""The server's socket, its life and its end."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dglkge.errors import InputError
from dglkge.launch.stop_signals import signals_recorded
from dglkge.serving.guard import Guard

STOP_SECONDS = 5
"""Time for open requests to finish after a signal."""

HEADER_SECONDS = 10.0
"""A connection whose next headers take longer is closed, so that half-sent requests do not collect."""

POLL_SECONDS = 0.1


class HeaderDeadline(H11Protocol):
    """Connection of uvicorn that is closed if the headers of its next request do not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Stop waiting once a request is complete."""
        super().data_received(data)
        if self._is_answering() and self._deadline is not None:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        """Wait for the headers of the next request."""
        super().on_response_complete()
        if not self._is_answering():
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host!r} has no address: {error}") from None
    # With the protocol named, asyncio sends small answers at once (TCP_NODELAY); else each waits 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port is free again as soon as its server has ended, while old connections are still closing.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}; --port 0 takes a free port"
        ) from None
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Return whether a bound socket can be reached from this machine only."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url_of(bound: socket.socket, host: str) -> str:
    """Return the address of the page, e.g. http://127.0.0.1:40123/."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}/"


def server_config(app: Guard) -> uvicorn.Config:
    """Return the settings of uvicorn."""
    return uvicorn.Config(
        app,
        http=HeaderDeadline,
        # Text of its own would go to stdout; errors go through the library's logging.
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=STOP_SECONDS,
    )


def serve_until_signal(app: Guard, bound: socket.socket, on_start: Callable[[], None]) -> int:
    """Answer requests until Ctrl-C, SIGTERM or SIGHUP.

    Signals that are ignored stay ignored. Requests that were being answered are finished, within
    :data:`STOP_SECONDS`; a second signal ends them. Returns the number of the first signal; 0 if the server
    ended by itself.
    """
    server = uvicorn.Server(server_config(app))
    recorded: list[int] = []
    # In another thread uvicorn installs no signal handlers: its own would also catch ignored signals.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
    with signals_recorded(recorded):
        thread.start()
        is_announced = False
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if server.started and not is_announced:
                is_announced = True
                try:
                    on_start()
                except BaseException:
                    server.should_exit = True
                    thread.join()
                    raise
            server.should_exit = server.should_exit or bool(recorded)
            server.force_exit = server.force_exit or len(recorded) > 1
    return recorded[0] if recorded else 0
