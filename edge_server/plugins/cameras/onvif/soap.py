"""SOAP 1.2 messages of ONVIF: envelopes, the login of a request, and the parser of responses.

Sources: ONVIF Core Specification (device and media services, WS-UsernameToken), WS-Discovery of April 2005, OASIS Web
Services Security UsernameToken Profile 1.0.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from datetime import datetime
from typing import NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ENVELOPE = "{http://www.w3.org/2003/05/soap-envelope}"
ADDRESSING = "{http://schemas.xmlsoap.org/ws/2004/08/addressing}"
DISCOVERY = "{http://schemas.xmlsoap.org/ws/2005/04/discovery}"
DEVICE = "{http://www.onvif.org/ver10/device/wsdl}"
MEDIA = "{http://www.onvif.org/ver10/media/wsdl}"
SCHEMA = "{http://www.onvif.org/ver10/schema}"

_SECURITY = "http://docs.oasis-open.org/wss/2004/01/oasis-200401-wss-"
MAX_URL_LENGTH = 4096
_MAX_TEXT_LENGTH = 512


class HostileXml(ValueError):
    """The XML is malformed or of a kind that is not read. The message is a reason."""


class Login(NamedTuple):
    user: str
    password: str


def envelope(body: str, header: str = "") -> bytes:
    """Return a message. The prefixes s, a, d, dn, tds, trt and tt are declared."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope" '
        'xmlns:a="http://schemas.xmlsoap.org/ws/2004/08/addressing" '
        'xmlns:d="http://schemas.xmlsoap.org/ws/2005/04/discovery" '
        'xmlns:dn="http://www.onvif.org/ver10/network/wsdl" xmlns:tds="http://www.onvif.org/ver10/device/wsdl" '
        'xmlns:trt="http://www.onvif.org/ver10/media/wsdl" xmlns:tt="http://www.onvif.org/ver10/schema">'
        f"<s:Header>{header}</s:Header><s:Body>{body}</s:Body></s:Envelope>"
    ).encode()


def username_token(login: Login, created: datetime) -> str:
    """Return the header that proves the password without sending it: Base64(SHA-1(nonce + created + password)).

    `created` is the time in UTC by the camera's clock.
    """
    nonce, time = secrets.token_bytes(16), created.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    digest = hashlib.sha1(nonce + time.encode() + login.password.encode(), usedforsecurity=False).digest()
    return (
        f'<w:Security s:mustUnderstand="1" xmlns:w="{_SECURITY}wssecurity-secext-1.0.xsd" '
        f'xmlns:u="{_SECURITY}wssecurity-utility-1.0.xsd"><w:UsernameToken><w:Username>{escape(login.user)}</w:Username>'
        f'<w:Password Type="{_SECURITY}username-token-profile-1.0#PasswordDigest">'
        f"{base64.b64encode(digest).decode()}</w:Password>"
        f'<w:Nonce EncodingType="{_SECURITY}soap-message-security-1.0#Base64Binary">'
        f"{base64.b64encode(nonce).decode()}</w:Nonce><u:Created>{time}</u:Created></w:UsernameToken></w:Security>"
    )


def parse_xml(data: bytes) -> ElementTree.Element:
    """Return the root of a message. The caller bounds the size. Raises HostileXml."""
    try:
        # As a text, so that no encoding that the message declares hides a document type.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise HostileXml("expected XML in UTF-8") from None
    # Only a document type can declare entities, which expand to any size or name files.
    if "<!DOCTYPE" in text:
        raise HostileXml("XML with a document type is not read")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise HostileXml(f"the XML is malformed: {error}") from None


def text_of(element: ElementTree.Element, path: str, max_length: int = _MAX_TEXT_LENGTH) -> str:
    """Return the text of an element below another, without control characters and cut; "" if there is none."""
    text = (element.findtext(path) or "").strip()[:max_length]
    return "".join(each if each.isprintable() else " " if each.isspace() else "" for each in text)


def fault_of(root: ElementTree.Element) -> str:
    """Return why the camera refuses a request, "" if the message is no fault."""
    fault = root.find(f".//{ENVELOPE}Fault")
    if fault is None:
        return ""
    codes = {text_of(code, ".").rpartition(":")[2] for code in fault.iter(f"{ENVELOPE}Value")}
    if "NotAuthorized" in codes:
        return "not authorized"
    return text_of(fault, f".//{ENVELOPE}Text") or "the camera refuses the request"
