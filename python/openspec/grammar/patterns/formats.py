"""Formats of JSON Schema as automata: no text that a standard rules out, and the others.

Narrower than the standards in this: no date has the year 0000, a leap second comes at 23:59:60 of
universal time and is written so, and no label of a host has hyphens in its third and fourth place
(those of international ones, of which few are valid). A host's labels are not counted together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.pattern import Pattern


def _automaton(source: str) -> Automaton:
    return Pattern(source).automaton(is_anchored=True)


# ---- Times: RFC 3339, and its appendix A for durations

_DAYS = r"0[1-9]|[12]\d"
_MONTH_AND_DAY = (
    rf"((0[13578]|1[02])-({_DAYS}|3[01])|(0[469]|11)-({_DAYS}|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_BY_FOUR = "(0[48]|[2468][048]|[13579][26])"  # but for 00
_DATE = rf"(\d{{4}}-{_MONTH_AND_DAY}|(\d\d{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
_OFFSET = r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?{_OFFSET}"
_LEAP_SECOND = r"23:59:60(\.\d+)?([Zz]|[+-]00:00)"
_LEAP_DAY = r"\d{4}-(06-30|12-31)"


def _with_year(source: str) -> Automaton:
    return _automaton(source) - _automaton("0000.*")


def _duration() -> Automaton:
    seconds = r"\d+S"
    minutes = rf"\d+M({seconds})?"
    time = rf"T(\d+H({minutes})?|{minutes}|{seconds})"
    days = r"\d+D"
    months = rf"\d+M({days})?"
    date = rf"(\d+Y({months})?|{months}|{days})({time})?"
    return _automaton(rf"P({date}|{time}|\d+W)")


# ---- Addresses: RFC 1123 for hosts, RFC 4291 for IPv6, RFC 5321 for mail

_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"


def _ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    last = rf"({group}:{group}|{_IPV4})"  # the last 32 bits
    forms = [f"({group}:){{6}}{last}"]
    for behind in range(8):  # groups behind the gap, of at least one group
        before = 7 - behind
        start = f"({group}(:{group}){{0,{before - 1}}})?" if before else ""
        end = group if behind == 1 else f"({group}:){{{behind - 2}}}{last}" if behind else ""
        forms.append(f"{start}::{end}")
    return f"({'|'.join(forms)})"


_LETTER_OR_DIGIT = "[A-Za-z0-9]"
_LABEL = f"{_LETTER_OR_DIGIT}([A-Za-z0-9-]{{0,61}}{_LETTER_OR_DIGIT})?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"


def _hostname() -> Automaton:
    return _automaton(_DOMAIN) - _automaton(r"([^.]*\.)*[^.]{2}--.*")


def _email() -> Automaton:
    atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    address = rf"{atom}(\.{atom})*@({_DOMAIN}|\[({_IPV4}|IPv6:{_ipv6()})\])"
    return _automaton(address) & _automaton("[^@]{1,64}@.*")


# ---- References: RFC 3986, and RFC 6570 for templates

_PERCENT = "%[0-9A-Fa-f]{2}"
_UNRESERVED = "A-Za-z0-9._~-"
_DELIMITERS = "!$&'()*+,;="


def _reference(*, is_relative: bool) -> Automaton:
    plain = f"{_DELIMITERS}{_UNRESERVED}"
    path = f"([:@/{plain}]|{_PERCENT})"
    character = f"([:@{plain}]|{_PERCENT})"
    user = f"([:{plain}]|{_PERCENT})*@"
    future = f"[vV][0-9A-Fa-f]+\\.[:{_DELIMITERS}{_UNRESERVED}]+"
    host = rf"(\[({_ipv6()}|{future})\]|([{plain}]|{_PERCENT})*)"
    authority = rf"({user})?{host}(:\d*)?"
    absolute = f"//{authority}(/{path}*)?|/({character}{path}*)?"
    behind = rf"(\?([?:@/{plain}]|{_PERCENT})*)?(#([?:@/{plain}]|{_PERCENT})*)?"
    whole = f"[A-Za-z][A-Za-z0-9+.-]*:({absolute}|{character}{path}*|){behind}"
    if not is_relative:
        return _automaton(whole)
    first = f"([@{plain}]|{_PERCENT})+"  # without a colon, which would end a scheme
    return _automaton(f"{whole}|({absolute}|{first}(/{path}*)?|){behind}")


def _template() -> Automaton:
    planes = "".join(rf"\u{{{one:x}0000}}-\u{{{one:x}fffd}}" for one in range(1, 17))
    international = rf"\u{{a0}}-\u{{fdcf}}\u{{fdf0}}-\u{{ffef}}{planes}"
    literal = rf"([!#$&(-;=?-\[\]_a-z~{international}]|{_PERCENT})"
    character = f"([A-Za-z0-9_]|{_PERCENT})"
    variable = rf"{character}(\.?{character})*(:[1-9]\d{{0,3}}|\*)?"
    return _automaton(rf"({literal}|\{{[+#./;?&]?{variable}(,{variable})*\}})*")


_POINTER = "(/([^~/]|~[01])*)*"

FORMATS: Mapping[str, Callable[[], Automaton]] = {
    name: cache(make)
    for name, make in {
        "date": lambda: _with_year(_DATE),
        "date-time": lambda: _with_year(f"{_DATE}[Tt]{_TIME}|{_LEAP_DAY}[Tt]{_LEAP_SECOND}"),
        "duration": _duration,
        "email": _email,
        "hostname": _hostname,
        "ipv4": lambda: _automaton(_IPV4),
        "ipv6": lambda: _automaton(_ipv6()),
        "json-pointer": lambda: _automaton(_POINTER),
        "relative-json-pointer": lambda: _automaton(rf"(0|[1-9]\d*)(#|{_POINTER})"),
        "time": lambda: _automaton(f"{_TIME}|{_LEAP_SECOND}"),
        "uri": lambda: _reference(is_relative=False),
        "uri-reference": lambda: _reference(is_relative=True),
        "uri-template": _template,
        "uuid": lambda: _automaton("[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    }.items()
}
"""What each format allows, by its name."""
