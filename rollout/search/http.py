"""Owns talking to search services over HTTP: one exchange as a typed outcome, and bounded retries around it.

Nothing that a service sends or that a request holds (bodies, headers, keys) ever stands in an error.
"""

import email.utils
import ipaddress
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import anyio
import httpx
import msgspec

from core.errors import ConfigError
from rollout.search.base import Found, Passage, Status, fault, found
from rollout.search.timer import REAL_TIME, Timer

MAX_WAIT = 60.0
"""Seconds: the longest wait between two tries, whatever Retry-After says."""
FIRST_WAIT = 1.0
"""Seconds before the first retry; doubled for each further one."""
MAX_BODY_BYTES = 8 << 20
MAX_PORT = 65_535
USER_AGENT = "Rolltape/0.1 (search-agent reinforcement learning; httpx)"

T = TypeVar("T")


class Attempt(NamedTuple):
    """What one try came to."""

    result: Found
    retryable: bool = False
    wait: float | None = None
    """Seconds to wait before the next try; None leaves it to the caller."""


class Reply(NamedTuple):
    """A complete answer with a 2xx status."""

    content_type: str
    body: bytes
    wait: float | None
    """Seconds that Retry-After asks for: services report rate limits under HTTP 200 as well."""


class Decoded(NamedTuple, Generic[T]):
    """What an answer says."""

    body: T
    wait: float | None
    """As Reply has it."""


def succeeded(passages: list[Passage], top_k: int) -> Attempt:
    """Return the attempt that found these passages."""
    return Attempt(found(passages, top_k))


def failed(status: Status, error: str, *, retryable: bool, wait: float | None = None) -> Attempt:
    """Return an attempt that failed; refused keys are fatal."""
    return Attempt(fault(status, error, fatal=status == "auth"), retryable, wait)


class HttpService:
    """One service: its address, its connections, and the patience with it."""

    def __init__(self, url: str, *, timeout: float, retries: int, timer: Timer = REAL_TIME) -> None:
        """Prepare to talk to `url`, an address; raises ConfigError when the environment's proxy is none."""
        self.url = url
        self.timer = timer
        self._timeout = timeout
        self._retries = retries
        try:
            self._client = httpx.AsyncClient(
                timeout=timeout,
                follow_redirects=False,
                trust_env=not _is_loopback(url),  # a proxy cannot reach this machine itself
                headers={"User-Agent": USER_AGENT, "Accept": "application/json"},
                limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ConfigError(
                "the proxy that the environment names (HTTPS_PROXY, ALL_PROXY) cannot be used "
                f"({type(error).__name__}): expected http://HOST:PORT, or unset it"
            ) from error

    def __repr__(self) -> str:
        return f"<HttpService {self.url}>"

    async def get(
        self, query_string: str, kind: type[T], headers: Mapping[str, str] | None = None
    ) -> Decoded[T] | Attempt:
        """GET the address with a query string; return the decoded JSON, or the failed attempt."""
        return await self._exchange(
            self._client.build_request("GET", f"{self.url}?{query_string}", headers=headers), kind
        )

    async def post(self, content: object, kind: type[T]) -> Decoded[T] | Attempt:
        """POST JSON to the address; return the decoded JSON, or the failed attempt."""
        body = msgspec.json.encode(content)
        headers = {"Content-Type": "application/json"}
        return await self._exchange(
            self._client.build_request("POST", self.url, content=body, headers=headers), kind
        )

    async def persist(self, attempt: Callable[[], Awaitable[Attempt]]) -> Found:
        """Try until it succeeds, cannot, or was retried often enough: one logical request in all."""
        started = self.timer.monotonic()
        limited = made = 0
        while True:
            tried = await attempt()
            limited += tried.result.status == "rate_limited"
            if tried.result.ok or not tried.retryable or made == self._retries:
                break
            wait = FIRST_WAIT * 2**made if tried.wait is None else tried.wait
            await self.timer.sleep(min(wait, MAX_WAIT))
            made += 1
        latency = self.timer.monotonic() - started
        return msgspec.structs.replace(tried.result, latency=latency, retries=made, rate_limited=limited)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _exchange(self, request: httpx.Request, kind: type[T]) -> Decoded[T] | Attempt:
        """Send one request; the timeout bounds the whole exchange, however slowly bytes drip."""
        try:
            with anyio.fail_after(self._timeout):
                response = await self._client.send(request, stream=True)
                try:
                    body = await _read(response)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            return failed("timeout", f"no answer within {self._timeout:g} s", retryable=True)
        except httpx.DecodingError:
            return failed("bad_response", "the answer's compression is broken", retryable=True)
        except httpx.UnsupportedProtocol:
            return failed("bad_request", "the address is not http or https", retryable=False)
        except httpx.HTTPError as error:
            return failed("error", f"connection failed ({type(error).__name__})", retryable=True)
        if body is None:
            return failed("bad_response", f"an answer of over {MAX_BODY_BYTES >> 20} MiB", retryable=False)
        reply = _judge(response, body, self.timer)
        return reply if isinstance(reply, Attempt) else _decode(reply, kind)


def is_address(url: str) -> bool:
    """Tell whether a request can be sent there at all: http or https, a host, a port that there is."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    whole = bool(parsed.host) and not any(letter.isspace() or letter == "%" for letter in parsed.host)
    return whole and parsed.scheme in ("http", "https") and 0 <= (parsed.port or 0) <= MAX_PORT


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _read(response: httpx.Response) -> bytes | None:
    """Return the body, None if there is too much of it."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _judge(response: httpx.Response, body: bytes, timer: Timer) -> Reply | Attempt:
    code = response.status_code
    wait = retry_after(response.headers, timer)
    if code == httpx.codes.TOO_MANY_REQUESTS:
        return failed("rate_limited", "too many requests (HTTP 429)", retryable=True, wait=wait)
    if code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return failed("auth", f"access refused (HTTP {code})", retryable=False)
    if code == httpx.codes.REQUEST_TIMEOUT or code >= httpx.codes.INTERNAL_SERVER_ERROR:
        return failed("error", f"the service failed (HTTP {code})", retryable=True, wait=wait)
    if code >= httpx.codes.BAD_REQUEST:
        return failed("bad_request", f"the request was refused (HTTP {code})", retryable=False)
    if not response.is_success:
        return failed("bad_response", f"unexpected redirection (HTTP {code})", retryable=False)
    return Reply(response.headers.get("Content-Type", ""), body, wait)


def retry_after(headers: Mapping[str, str], timer: Timer) -> float | None:
    """Return the seconds that a service asks to wait (as a number or a date), None if it asks nothing."""
    said = headers.get("Retry-After", "").strip()
    if not said:
        return None
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(said).timestamp() - timer.wall()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_WAIT) if math.isfinite(seconds) else None


def _decode(reply: Reply, kind: type[T]) -> Decoded[T] | Attempt:
    """Decode a JSON body: UTF-8, or the charset that the service names."""
    body = reply.body.removeprefix(b"\xef\xbb\xbf")
    charset = reply.content_type.lower().partition("charset=")[2].split(";")[0].strip(" \"'")
    try:
        text = body.decode(charset or "utf-8")  # all of it, also where the decoder would not look
        return Decoded(msgspec.json.decode(text, type=kind), reply.wait)
    except (msgspec.DecodeError, UnicodeError, LookupError, RecursionError):
        return failed("bad_response", "the answer is not the JSON that was expected", retryable=True)
