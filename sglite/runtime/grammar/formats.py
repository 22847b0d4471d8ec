"""The values of JSON Schema's ``format`` as assertions: what the mask can say, and a check for the rest.

Sources: RFC 3339 (dates, times, durations), 5321 (email), 1123 and 5891 (host names), 4291 (IPv6), 3986 and 3987
(URI, IRI), 6570 (URI templates), 6901 (JSON pointers). A format that is not listed is an annotation, as the
specification says of unknown ones.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import idna

from sglite.errors import GrammarError
from sglite.runtime.grammar.ecma import translate


@dataclass(frozen=True)
class Format:
    """``mask`` is a schema without ``format`` or with one the mask engine knows; it allows every valid string (save
    where a note says it does not). ``exact``: it allows nothing else, so that nothing is left to check."""

    mask: dict[str, Any]
    check: Callable[[str], bool]
    exact: bool = False


def known(name: object) -> Format | None:
    return FORMATS.get(name) if isinstance(name, str) else None


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _exact(pattern: str) -> Format:
    """A format that is a regular expression, in syntax that Python and Rust share."""
    return Format({"pattern": f"^(?:{pattern})$"}, _matches(pattern), exact=True)


# ---------------------------------------------------------------------------------------------------- dates, times

_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d|60)(\.\d+)?([Zz]|([+-])([01]\d|2[0-3]):([0-5]\d))", re.ASCII)
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
"""The days that there are; year 0 is a leap year, too."""
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME_MASK = rf"{_CLOCK}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_DURATION = r"P(?:\d+W|(?=[\dT])(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=\d)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)"


def _time(text: str) -> bool:
    """A leap second only at 23:59:60 UTC."""
    found = _TIME.fullmatch(text)
    if found is None or found.group(3) != "60":
        return found is not None
    sign = {"-": 1, "+": -1}.get(found.group(6), 0)
    offset = sign * (60 * int(found.group(7) or 0) + int(found.group(8) or 0))
    return (60 * int(found.group(1)) + int(found.group(2)) + offset) % 1440 == 1439


def _date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and re.fullmatch(_DATE, text[:10]) is not None and _time(text[11:])


# -------------------------------------------------------------------------------------------------- hosts, addresses

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"{_OCTET}(?:\\.{_OCTET}){{3}}"
_MIXED = (
    "(?:(?:H:){6}|::(?:H:){0,5}|H::(?:H:){0,4}|(?:H:){1,2}:(?:H:){0,3}|(?:H:){1,3}:(?:H:){0,2}"
    f"|(?:H:){{1,4}}:(?:H:)?|(?:H:){{1,5}}:){_IPV4}"
).replace("H", "[0-9A-Fa-f]{1,4}")
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LOCAL = rf"(?:{_ATOM}(?:\.{_ATOM})*|\"(?:[ !#-\[\]-~]|\\[ -~])*\")"
_DOMAIN = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\]|\[IPv6:[0-9A-Fa-f:.]+\])"


def _hostname(text: str) -> bool:
    if len(text) > 253 or re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", text) is None:
        return False
    return all(_a_label(label) for label in text.split("."))


def _a_label(label: str) -> bool:
    """Labels with "--" in third place are reserved for "xn--", and that must decode."""
    if label[2:4] != "--":
        return True
    try:
        return label.lower().startswith("xn--") and bool(idna.ulabel(label))
    except (idna.IDNAError, UnicodeError):
        return False


def _idn_hostname(text: str) -> bool:
    labels = re.split("[.\u3002\uff0e\uff61]", text)
    try:
        size = sum(len(idna.alabel(label)) + 1 for label in labels) - 1
        if any(_right_to_left(label) for label in labels):
            return size <= 253 and all(idna.check_bidi(label, check_ltr=True) for label in labels)
        return size <= 253
    except (idna.IDNAError, UnicodeError):
        return False


def _right_to_left(label: str) -> bool:
    return any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in label)


def _ipv6(text: str) -> bool:
    try:
        return "%" not in text and text.isascii() and bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _email(text: str) -> bool:
    if re.fullmatch(f"{_LOCAL}@{_DOMAIN}", text) is None:
        return False
    literal = re.search(r"@\[IPv6:([^\]]*)\]$", text)
    return literal is None or _ipv6(literal.group(1))


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _idn_email(text: str) -> bool:
    local, at, domain = text.rpartition("@")
    return bool(at) and re.fullmatch(r"[^\x00- @<>()\[\]\\,;:]+", local) is not None and _idn_hostname(_nfc(domain))


# ------------------------------------------------------------------------------------------------------------- URIs

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"
_BEYOND = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000efffd"


def _reference(scheme: str, beyond: str = "") -> Callable[[str], bool]:
    """A URI (scheme "...:"), or a reference that may lack it ("(...:)?"); ``beyond`` are more characters, for IRIs."""
    char = rf"A-Za-z0-9._~!$&'()*+,;=%{beyond}-"
    private = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd" if beyond else ""
    authority = rf"//(?:[{char}:]*@)?(?:\[([^\]]+)\]|[{char}]*)(?::[0-9]*)?(?:/[{char}:@/]*)?"
    path = rf"(?!//)(?:(?<=:)|/|(?![^/?#]*:))[{char}:@/]*"
    whole = re.compile(rf"{scheme}(?:{authority}|{path})(?:\?[{char}{private}:@/?]*)?(?:#[{char}:@/?]*)?")

    def check(text: str) -> bool:
        found = whole.fullmatch(text)
        return found is not None and _literal_host(found.group(1)) and not re.search("%(?![0-9A-Fa-f]{2})", text)

    return check


def _literal_host(host: str | None) -> bool:
    return host is None or _ipv6(host) or re.fullmatch(r"[vV][0-9A-Fa-f]+\.[\w.~!$&'()*+,;=:-]+", host) is not None


_VARNAME = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(?:\.(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+)*(?::[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = (
    r"(?:[!#$&'()*+,./0-9:;=?@A-Z\[\]_a-z~" + _BEYOND + r"-]|%[0-9A-Fa-f]{2}"
    rf"|\{{[+#./;?&=,!@|]?{_VARNAME}(?:,{_VARNAME})*\}})*"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _regex(text: str) -> bool:
    try:
        translate(text).check()
    except GrammarError:
        return False
    return "(?P" not in text  # Python's spelling of a named group, which patterns may use here


FORMATS: dict[str, Format] = {
    "date": _exact(_DATE),
    "time": Format({"pattern": f"^{_TIME_MASK}$"}, _time),
    "date-time": Format({"pattern": f"^{_DATE}[Tt]{_TIME_MASK}$"}, _date_time),
    "duration": Format({"format": "duration"}, _matches(_DURATION), exact=True),
    "email": Format({"pattern": f"^{_LOCAL}@{_DOMAIN}$"}, _email),
    "idn-email": Format({"pattern": "^[^\\x00-\\x20@<>(),;:\\[\\]]+@[^\\x00-\\x20@]+$"}, _idn_email),
    "hostname": Format({"format": "hostname"}, _hostname),
    "idn-hostname": Format({"pattern": "^[^\\x00-\\x20@/?#:]{1,253}$"}, _idn_hostname),
    "ipv4": Format({"format": "ipv4"}, _matches(_IPV4), exact=True),
    "ipv6": Format({"anyOf": [{"format": "ipv6"}, {"pattern": f"^{_MIXED}$"}]}, _ipv6),
    "uri": Format({"format": "uri"}, _reference(_SCHEME)),
    "uri-reference": Format({"pattern": "^[A-Za-z0-9._~:/?#\\[\\]@!$&'()*+,;=%-]*$"}, _reference(f"(?:{_SCHEME})?")),
    "iri": Format({"pattern": f"^{_SCHEME}[^ \\x00-\\x20<>\\\\^`{{|}}]*$"}, _reference(_SCHEME, _BEYOND)),
    "iri-reference": Format({"pattern": "^[^\\x00-\\x20<>\\\\^`{|}]*$"}, _reference(f"(?:{_SCHEME})?", _BEYOND)),
    "uuid": Format({"format": "uuid"}, _matches("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"), exact=True),
    "uri-template": _exact(_TEMPLATE),
    "json-pointer": _exact(_POINTER),
    "relative-json-pointer": _exact(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "regex": Format({}, _regex),
}
