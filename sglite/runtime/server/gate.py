"""Who may come in: API keys, the admin's key, and the names under which the server may be called.

Without any key everybody may come in, and admin routes are served only where the server listens on loopback. With
keys every path needs one but the public ones. A key's requests share caches with no other key's.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.context import Caller
from sglite.runtime.server.failures import Failure, Refusal, refuse
from sglite.runtime.server.page import PATHS

PUBLIC = frozenset({"/health", "/ping"})
ADMIN = frozenset({"/flush_cache", "/start_profile", "/stop_profile"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Gate:
    """ASGI middleware that puts a Caller into the request's state, or refuses the request."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [(_digest(key), Caller(_namespace(key))) for key in config.api_keys]
        if config.admin_key:
            self._keys.append((_digest(config.admin_key), Caller(_namespace(config.admin_key), is_admin=True)))
        self._anyone = Caller(is_admin=is_loopback(config.host))
        self._hosts = frozenset(config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_host(headers)
            if scope["path"] not in PUBLIC:
                scope["state"]["caller"] = self._admit(scope["path"], headers)
        await self._app(scope, receive, send)

    def _admit(self, path: str, headers: Headers) -> Caller:
        caller = self._caller(headers, page=path in PATHS)
        if path in ADMIN and not caller.is_admin:
            raise _denied("this route needs the admin key", 403, "admin_required")
        return caller

    def _caller(self, headers: Headers, *, page: bool) -> Caller:
        if not self._keys:
            return self._anyone
        given = _basic(headers) if page else _bearer(headers)
        found = None
        for digest, caller in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None and page:
            message = "the page asks for any user name, and an API key as the password"
            raise _denied(message, 401, "invalid_api_key", 'Basic realm="sglite"')
        if found is None:
            raise _denied("missing or wrong API key; send it as a bearer token", 401, "invalid_api_key")
        return found

    def _check_host(self, headers: Headers) -> None:
        """A page in a browser may call us under its own name, pointed at our address: not under one of ours."""
        names = headers.getlist("host")
        if self._hosts and (len(names) != 1 or host_name(names[0]) not in self._hosts):
            raise refuse(421, "this server is not called that; see the option allowed-hosts", "unknown_host")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_hosts(host: str) -> tuple[str, ...]:
    """The names a server may be called by when nobody says: on loopback those of loopback, else any."""
    return tuple(sorted(_LOOPBACK_NAMES | {host})) if is_loopback(host) else ()


def host_name(value: str) -> str:
    name, colon, port = value.rpartition(":")
    return (name if colon and port.isdecimal() else value).lower()


def _bearer(headers: Headers) -> bytes:
    values = headers.getlist("authorization")
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return _digest(key.strip()) if scheme.lower() == "bearer" else b""


def _basic(headers: Headers) -> bytes:
    """For the page's own files, which a browser fetches: it asks its user, for a key as the password."""
    values = headers.getlist("authorization")
    scheme, _, encoded = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "basic":
        return _bearer(headers)
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode()
    except ValueError:
        return b""
    return _digest(pair.partition(":")[2])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _namespace(key: str) -> str:
    return hashlib.sha256(b"namespace:" + key.encode()).hexdigest()[:16]


def _denied(message: str, status: int, code: str, scheme: str = "Bearer") -> Refusal:
    kind = "authentication_error" if status == 401 else "permission_error"
    headers = {"www-authenticate": scheme} if status == 401 else {}
    return Refusal(Failure(status, message, kind, code=code, headers=headers))
