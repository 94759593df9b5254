"""The server: its socket, its life and its end; what it checks of a request before the application has it.

Checked are Host header, origin, token and size, and how long headers and body take. Every answer has security
headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dglkge.errors import InputError, os_errors
from dglkge.launch.remote.protocol import read_private
from dglkge.launch.stop_signals import signals_recorded

STOP_SECONDS = 5
"""Time for open requests to finish after a signal."""

HEADER_SECONDS = 10.0
"""A connection whose next headers take longer is closed, so that half-sent requests do not collect."""

POLL_SECONDS = 0.1

MAX_BODY_BYTES = 1 << 20

BODY_SECONDS = 10.0
"""A body that takes longer is refused, so that slow clients do not collect."""

MIN_TOKEN_LENGTH = 16

SECURITY_HEADERS = {
    # The page loads its own three files and asks its own server; nothing else, and no inline script or style.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

# After 408 and 413 the rest of the body is not read.
REFUSAL_HEADERS = {401: {"www-authenticate": "Bearer"}, **dict.fromkeys((408, 413), {"connection": "close"})}


class HeaderDeadline(H11Protocol):
    """Connection of uvicorn that is closed if the headers of its next request do not arrive in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Stop waiting once a request is complete."""
        super().data_received(data)
        if self._is_answering():
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        """Wait for the headers of the next request."""
        super().on_response_complete()
        if not self._is_answering():
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 takes a free one."""
    kind: dict[str, int] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    with os_errors(InputError, f"--host {host!r} has no address", UnicodeError):
        family, _, _, _, address = socket.getaddrinfo(host, port, **kind)[0]
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
        try:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                if server.started and not is_announced:
                    is_announced = True
                    on_start()
                server.should_exit |= bool(recorded)
                server.force_exit |= len(recorded) > 1
        finally:
            server.should_exit = True
            thread.join()
    return recorded[0] if recorded else 0


class HostNames:
    """Host names under which the server answers.

    A page of another site may give its own name the address 127.0.0.1 (DNS rebinding), and its scripts then
    count as the server's own. Such requests have that name in the Host header. An address in it cannot be
    rebound; where the server is reachable from this machine only, other addresses are refused too.
    """

    def __init__(self, host: str, is_loopback: bool, other_hosts: Iterable[str] = ()) -> None:
        self._is_loopback = is_loopback
        self.names = {"localhost", *(name.casefold().rstrip(".") for name in (host, *other_hosts))}

    def allows(self, header: str) -> bool:
        """Return whether the value of a Host header is a known name or an address; any port."""
        if set(header) & set("/?#@\\"):
            return False
        try:
            name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
            if name in self.names:
                return True
            return ipaddress.ip_address(name).is_loopback or not self._is_loopback
        except ValueError:
            return False


class Guard:
    """ASGI application around another one: refuses requests, adds headers to all responses.

    Requests of all but the public paths need the token, if there is one, as ``Authorization: Bearer TOKEN``.
    """

    def __init__(self, app: ASGIApp, hosts: HostNames, public: set[str], token: str | None = None) -> None:
        self._app = app
        self._hosts = hosts
        self._public = public
        self._token = None if token is None else token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        status, problem = self._refusal(scope["path"], headers)
        body = b""
        if not problem and scope["method"] not in ("GET", "HEAD"):
            status, problem, body = await _read_body(headers, receive)
        if problem:
            refusal = JSONResponse({"error": problem}, status, REFUSAL_HEADERS.get(status))
            await refusal(scope, receive, send_with_headers)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def client_leaves() -> Message:
            while (message := await receive())["type"] != "http.disconnect":
                pass
            return message

        leaving = asyncio.ensure_future(client_leaves())

        async def receive_body() -> Message:
            return messages.pop() if messages else await asyncio.shield(leaving)

        answer = asyncio.ensure_future(self._app(scope, receive_body, send_with_headers))
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            # Nobody reads the answer of a client that left: its place in the queue of the model is free.
            if not answer.done():
                answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer
        finally:
            leaving.cancel()
            answer.cancel()

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str]:
        """Return status and text of the refusal of a request by its headers; an empty text for none."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._hosts.allows(hosts[0]):
            got = repr(", ".join(hosts)[:200]) if hosts else "none"
            return 400, f"Host header: got {got}; allowed: {', '.join(sorted(self._hosts.names))}"
        if path in self._public:
            return 0, ""
        # Browsers send this header and scripts cannot change it. The answer would be hidden from another
        # site's page anyway, but it could keep the server busy.
        site = headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none"):
            return 403, f"requests from pages of other sites are refused (Sec-Fetch-Site: {site[:40]})"
        if self._token is not None:
            scheme, _, value = " ".join(headers.getlist("authorization")).partition(" ")
            if scheme.casefold() != "bearer":
                return 401, "a token is needed: send the header 'Authorization: Bearer TOKEN'"
            # Takes the same time wherever the first difference is.
            if not hmac.compare_digest(value.strip().encode("latin-1"), self._token):
                return 401, "the token is wrong"
        return 0, ""


async def _read_body(headers: Headers, receive: Receive) -> tuple[int, str, bytes]:
    """Read the body; return status and text of a refusal, or an empty text and the body."""
    kind = " ".join(headers.getlist("content-type")).partition(";")[0].strip().casefold()
    if kind != "application/json":
        return 415, f"Content-Type: got {kind[:100]!r}; allowed: application/json", b""
    too_large = f"the body has more than {MAX_BODY_BYTES} bytes"
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        return 413, f"{too_large}: {length}", b""
    body = bytearray()

    async def read_all() -> None:
        has_more = True
        while has_more and len(body) <= MAX_BODY_BYTES:
            message = await receive()
            body.extend(message.get("body", b""))
            has_more = message.get("more_body", False)

    try:
        await asyncio.wait_for(read_all(), BODY_SECONDS)
    except asyncio.TimeoutError:
        return 408, f"the body did not arrive within {BODY_SECONDS:g} s", b""
    return (0, "", bytes(body)) if len(body) <= MAX_BODY_BYTES else (413, too_large, b"")


def valid_token(token: str, where: str) -> str:
    """Return a token that is long enough and can be sent in a header; no message shows it."""
    if len(token) < MIN_TOKEN_LENGTH:
        raise InputError(
            f"the token {where} has {len(token)} characters, at least {MIN_TOKEN_LENGTH} are needed; "
            'this makes one: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    if not all("!" <= letter <= "~" for letter in token):
        raise InputError(f"the token {where} has other characters than ASCII letters, digits and signs")
    return token


def read_token(path: Path) -> str:
    """Read a token from the first line of a file that no other user can read."""
    try:
        lines = read_private(path, "--token")[:65536].decode("utf-8").splitlines()
    except OSError as error:
        # The name is not shown: it may be a token that somebody gave in place of a file.
        raise InputError(
            f"cannot read the file that --token names: {error.strerror}; --token takes a file (or - to be "
            "asked), because arguments can be read in the list of processes"
        ) from None
    except UnicodeDecodeError:
        raise InputError("the file that --token names is not text in UTF-8") from None
    return valid_token(lines[0].strip() if lines else "", "in the file that --token names")
