"""`/ui`: one page that shows what speculation does, put together from the files in `ui/`."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from openspec.serve.generation.context import ServerContext

FOLDER = Path(__file__).parents[1] / "ui"
_NAMES = ("api", "words", "tokens", "markdown", "tree", "panel", "race", "chats", "main")
SCRIPTS = tuple(f"{name}.js" for name in _NAMES)


async def ui(_: ServerContext, __: Request) -> Response:
    """A page that shows drafts as they are made and accepted."""
    page, headers = _page()
    return Response(page, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page, and a policy under which nothing but its own style and script runs."""
    style = _compact_style((FOLDER / "style.css").read_text("utf-8"))
    script = _compact_script("".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS))
    page = _compact((FOLDER / "page.html").read_text("utf-8"))
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return page.encode(), headers


def _compact(text: str) -> str:
    """Without indentation and lines of comment; no text in the files spans lines."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _compact_style(text: str) -> str:
    """Without comments, and without white space that separates nothing."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"\s*([{};,>])\s*|(?<=:)\s+", r"\1", text).strip().replace(";}", "}")


def _compact_script(text: str) -> str:
    """Without white space round operators, but for texts in double quotes."""
    pattern = r'("(?:\\.|[^"\\\n])*")| (===?|!==|[-+]?=|=>|&&|\|\||[?:]) '
    return re.sub(pattern, r"\1\2", _compact(text))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
