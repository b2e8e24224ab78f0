"""Formats: no value that others refuse, drawn at random, and those that standards give."""

from __future__ import annotations

import datetime
import ipaddress
import random
import re
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

import jsonschema_rs
import pytest

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.formats import FORMATS

RIGHT = {
    "date": ["2024-02-29", "2000-02-29", "1990-12-31", "0001-01-01", "9999-12-31"],
    "time": ["23:59:60Z", "08:30:06.283185Z", "10:05:08+01:00", "00:00:00-23:59", "08:30:06z"],
    "date-time": ["1998-12-31T23:59:60Z", "1963-06-19t08:30:06.283185z",
        "1990-12-31T15:59:50.123-08:00"],
    "duration": ["P4DT12H30M5S", "P4Y", "PT0S", "P1M", "PT1M", "P2W", "P1Y2M3DT4H5M6S"],
    "email": ["joe.bloggs@example.com", "te~st@example.com", "~t@e", "j@[127.0.0.1]",
        "j@[IPv6:::1]"],
    "hostname": ["www.example.com", "hostname", "host-name", "h0stn4me", "1host",
        "a" * 63 + ".com"],
    "ipv4": ["192.168.0.1", "0.0.0.0", "255.255.255.255"],
    "ipv6": ["::1", "::", "1::", "::42:ff:1", "1:2::192.168.0.1", "::ffff:192.168.0.1",
        "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::4:5:6:7:8"],
    "json-pointer": ["", "/", "/foo/0", "/a~1b", "/m~0n", "/foo//bar", "/i\\j", '/k"l'],
    "relative-json-pointer": ["1", "0/foo/bar", "2/0/baz/1/zip", "0#", "120/foo"],
    "uri": ["http://foo.bar/?baz=qux#quux", "http://foo.com/blah_(wikipedia)_blah#cite-1",
        "urn:isbn:0451450523", "http://[2001:db8::1]:80/x?y", "mailto:John.Doe@example.com",
        "tel:+1-816-555-1212", "https://user:pass@host:8080/a%20b",
        "ftp://ftp.is.co.za/rfc/rfc1808.txt", "http://[v1.a:b]/"],
    "uri-reference": ["/abc", "//foo.bar/?q#f", "#frag", "abc", "", "../x;y=1", "?a=b", "a/b:c"],
    "uri-template": ["http://example.com/{term:1}/{term}", "dictionary/{+a,b*}", "",
        "{/id*}{?q,r}", "é{x}"],
    "uuid": ["2EB8AA08-AA98-11EA-B4AA-73B441D16380", "2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
}  # fmt: skip
WRONG = {
    "date": ["2023-02-29", "1900-02-29", "2100-02-29", "1990-04-31", "2020-13-01", "2020-00-01",
        "20-01-01", "২020-01-01"],
    "time": ["24:00:00Z", "10:20:60-11:57", "22:59:60Z", "23:60:00Z", "01:02:03",
        "10:20:30+24:00", "10:20:30+01:60"],
    "date-time": ["1990-02-31T15:59:59Z", "1998-12-31T23:58:60Z", "1998-11-30T23:59:60Z",
        "2020-01-01 00:00:00Z"],
    "duration": ["P", "PT", "P1D2H", "P2D1Y", "P1YT", "PT1D", "1D", "P1W1D", "P1Y2W", "P1Y2D"],
    "email": ["2962", ".test@example.com", "test.@e", "te..st@e", "a@b=c.com",
        "j@[127.0.0.300]", "a" * 65 + "@b"],
    "hostname": ["-bad", "bad-", "a_b", "a..b", ".", "", "a" * 64, "xn--X", "ab--c.de"],
    "ipv4": ["087.10.0.1", "256.0.0.1", "1.2.3", "1.2.3.4.5", "0x7f000001", "1.2.3.4 ",
        "১27.0.0.1"],
    "ipv6": ["::00.12.0.25", "12345::", "::abcef", "1:1:1:1:1:1:1:1:1", ":1:2:3:4:5:6:7",
        "1:2:3:4:5:6:7", "1::2::3", "::1%eth1", "1:2:3:4:5:6:7:8::", "::1.2.3",
        "1:2:3:4:5:6:7:1.2.3.4"],
    "json-pointer": ["/~", "a", "#", "/a~2"],
    "relative-json-pointer": ["-1/a", "01/a", "/a", "0##", "+1"],
    "uri": ["//foo.bar", "/abc", "http:// x", "a\\b", "bar,baz:foo", "http://a/<b>", "1a:b",
        "http://[::1", ""],
    "uri-reference": ["\\\\WIN", "#frag\\ment", "1a:b", "a b"],
    "uri-template": ["{term:1}/{term", "{", "}", "{+}", "a b", "{x:0}", "{x:10000}"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8-aa08-aa98-11ea-b4aa73b44-1d16380",
        "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, one) for name in RIGHT for one in RIGHT[name]])
def test_what_standards_give(name: str, text: str) -> None:
    assert FORMATS[name]().accepts(text)


@pytest.mark.parametrize(("name", "text"), [(name, one) for name in WRONG for one in WRONG[name]])
def test_what_standards_rule_out(name: str, text: str) -> None:
    assert not FORMATS[name]().accepts(text)


def drawn(found: Automaton, rng: random.Random) -> str:
    """One of the texts: a walk that ends soon after it may."""
    text, state = "", 0
    while True:
        row = found.arcs(state)
        if found.may_end(state) and (not row or rng.random() < 0.2):
            return text
        low, high, state = rng.choice(row)
        text += chr(rng.randint(low, high))


def is_time(text: str) -> bool:
    """A leap second is read as the second before it."""
    datetime.time.fromisoformat(
        re.sub(r"(\d)z$", r"\1+00:00", text.upper().replace(":60", ":59"), flags=re.I)
    )
    return True


def is_date_time(text: str) -> bool:
    date, _, time = text.upper().partition("T")
    datetime.date.fromisoformat(date)
    return is_time(re.sub(r"(\.\d{6})\d*", r"\1", time))


def is_hostname(text: str) -> bool:
    return all(0 < len(label) < 64 and label.strip("-") == label for label in text.split("."))


def is_of_schema(name: str) -> Callable[[str], bool]:
    validator = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
    return validator.is_valid


ORACLES: dict[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "date-time": is_date_time,
    "duration": is_of_schema("duration"),
    "email": lambda text: text.count("@") == 1 and ".." not in text.partition("@")[0],
    "hostname": is_hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "json-pointer": is_of_schema("json-pointer"),
    "relative-json-pointer": is_of_schema("relative-json-pointer"),
    "time": is_time,
    "uri": lambda text: urlsplit(text).scheme and is_of_schema("uri-reference")(text),
    "uri-reference": is_of_schema("uri-reference"),
    "uri-template": is_of_schema("uri-template"),
    "uuid": uuid.UUID,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_value_is_wrong(name: str, request: pytest.FixtureRequest) -> None:
    rng, found = random.Random(name), FORMATS[name]()
    for _ in range(5000 if request.config.getoption("--full") else 150):
        text = drawn(found, rng)
        assert found.accepts(text)
        value = ORACLES[name](text)  # those of Python raise
        assert value is not False and value != "", text
        if name == "ipv6":
            assert len(ipaddress.IPv6Address(text).packed) == 16


@pytest.mark.parametrize("name", ["date", "ipv4", "ipv6", "uuid"])
def test_no_right_value_is_missing(name: str) -> None:
    rng, found = random.Random(name), FORMATS[name]()
    for _ in range(200):
        bits = rng.getrandbits(128)
        if name == "date":
            text = datetime.date.fromordinal(rng.randint(1, 3_652_059)).isoformat()
        elif name == "ipv4":
            text = str(ipaddress.IPv4Address(bits >> 96))
        elif name == "uuid":
            text = str(uuid.UUID(int=bits))
        else:
            mask = sum(0xFFFF << 16 * one for one in range(8) if rng.random() < 0.6)
            address = ipaddress.IPv6Address(bits & mask)
            text = rng.choice([address.compressed, address.exploded, address.compressed.upper()])
        assert found.accepts(text), text
