"""HTTP client of an operator for a real admin server."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

WAIT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """Response of the admin server."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def etag(self) -> str:
        return self.headers["etag"]


class AdminHttp:
    """Sends requests to one server."""

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address
        self._token = token

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request. ``_`` in the name of a header stands for ``-``."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._token:
            sent.setdefault("authorization", f"Bearer {self._token}")
        raw = None
        if body is not None:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        try:
            connection.request(method, path, raw, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, status: int = 200, **headers: str) -> Any:
        answer = self.ask("GET", path, **headers)
        assert answer.status == status, (path, answer.raw)
        return answer.json

    def post(self, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
        answer = self.ask("POST", path, body, **headers)
        assert answer.status == status, (path, answer.raw)
        return answer.json

    def put(self, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
        answer = self.ask("PUT", path, body, **headers)
        assert answer.status == status, (path, answer.raw)
        return answer.json

    def all(self, path: str, limit: int) -> list[Any]:
        """Return the entries of all pages of a list."""
        items: list[Any] = []
        cursor = ""
        while True:
            page = self.get(f"{path}?limit={limit}{cursor}")
            assert len(page["items"]) <= limit
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            cursor = f"&cursor={page['next_cursor']}"
