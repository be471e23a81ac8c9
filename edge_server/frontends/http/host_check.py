"""Check of the Host header: a listener on a loopback address serves only requests for this machine's names.

A page of another site can let its own name resolve to 127.0.0.1 (DNS rebinding). For the browser, this server is then a
part of that site: the page reads every response, and its requests have no foreign Origin. Only Host shows the name.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable

from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, plain_error

_LOG = logging.getLogger(__name__)

_MAX_LOGGED_NAMES = 32
"""Maximum number of refused names that are logged: a client may send any number of them."""

_MAX_REMEMBERED = 64
"""Maximum number of served hosts that are remembered, which saves a quarter of the cost of a new head."""

_MAX_SHOWN = 100
"""Maximum number of characters of a refused name in a response or a log line."""

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::[0-9]*)?")
"""A Host header: an IPv6 address in brackets or a name, and a port."""


class HostNames:
    """The names of this server: IP addresses, localhost, the names of the machine, and `allowed_hosts`, which `flag`
    adds."""

    def __init__(self, allowed_hosts: Iterable[str], flag: str = "--http-allowed-host") -> None:
        self.flag = flag
        self.allowed = frozenset(host.lower() for host in allowed_hosts)

    def has(self, name: str) -> bool:
        """Return whether a name in lower case, without a port, is one of this server.

        Any IP address is: only a name can lead to a machine that is not its owner's. Browsers resolve localhost and the
        names below it to this machine, without asking DNS.
        """
        if name in self.allowed or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            # Not stored: the name of a machine may change while the server runs.
            machine = socket.gethostname().lower()
            label = machine.partition(".")[0]
            return bool(label) and name in (machine, label, f"{label}.local")
        return True


class HostCheck:
    """Refuses requests whose Host is not in `names`, and logs each refused name once."""

    def __init__(self, names: HostNames) -> None:
        self._names = names
        self._served: set[str] = set()
        self._logged: set[str] = set()

    def refusal(self, head: RequestHead) -> HttpResponse | None:
        """Return the response to a request for another host, or None. A request without Host passes."""
        hosts = head.headers.getall("host")
        if len(hosts) == 1 and hosts[0] in self._served:
            return None
        foreign = [host for host in hosts if host and not self._is_own(host)]
        if not foreign:
            return None
        match = _HOST.fullmatch(foreign[0])
        name = (match[2] or match[1] if match else foreign[0])[:_MAX_SHOWN].encode("ascii", "replace").decode()
        self._log(name)
        return plain_error(
            f"Host '{name}' is not a name of this machine. This address is for this machine only, so it answers for "
            f"IP addresses, localhost and the machine's names; {self._names.flag}={name} adds this one",
            421,
        )

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        is_own = match is not None and self._names.has((match[1] or match[2]).lower().removesuffix("."))
        if is_own and len(self._served) < _MAX_REMEMBERED:
            self._served.add(host)
        return is_own

    def _log(self, name: str) -> None:
        if name in self._logged or len(self._logged) > _MAX_LOGGED_NAMES:
            return
        self._logged.add(name)
        if len(self._logged) > _MAX_LOGGED_NAMES:
            _LOG.warning("requests for further hosts are refused without a line here")
        else:
            _LOG.warning("request for host '%s' refused; %s=%s admits it", name, self._names.flag, name)
