"""The chat page: one file without outside resources, and the policy that keeps it so."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


def load_page() -> tuple[bytes, dict[str, str]]:
    """(the page, its headers). The browser may run exactly its own script and style, and talk to this server only."""
    page = files(__name__).joinpath("index.html").read_bytes()

    def sources(tag: bytes) -> str:
        bodies = re.findall(b"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}'" for body in bodies)

    policy = (
        f"default-src 'none'; script-src {sources(b'script')}; style-src {sources(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return page, {**headers, "content-type": "text/html; charset=utf-8"}
