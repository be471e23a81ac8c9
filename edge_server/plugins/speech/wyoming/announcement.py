"""Announcement of the Wyoming port by multicast DNS (RFC 6762, RFC 6763), by which Home Assistant finds it.

Home Assistant looks for services of the type `_wyoming._tcp.local.`, as other servers of the protocol announce them.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import Any

from edge_server.backends.runtime_errors import import_runtime
from edge_server.errors import ServingFault

log = logging.getLogger(__name__)

_TYPE = "_wyoming._tcp.local."
_MAX_NAME = 63
"""Bytes of a label of DNS."""


class WyomingAnnouncement:
    """Announces one port from `start` to `stop`. Lives on the server's event loop."""

    def __init__(self, host: str, port: int) -> None:
        """`host` is where the port listens; 0.0.0.0 and :: are all addresses of the machine.

        Raises BackendMissing without the package, ServingFault for a host that is no address.
        """
        self._asyncio = import_runtime("zeroconf.asyncio", "AsyncZeroconf", "zeroconf")
        self._library = import_runtime("zeroconf", "ServiceInfo", "zeroconf")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise ServingFault(f"--wyoming-announce: expected an address of IP in --wyoming, got {host[:80]}") from None
        self._address = address
        self._port = port
        self._running: Any = None

    async def start(self) -> None:
        """Begin to answer. Does not wait until other machines have heard of it."""
        everywhere = self._address.is_unspecified
        library = self._library
        try:
            self._running = self._asyncio.AsyncZeroconf(
                interfaces=library.InterfaceChoice.All if everywhere else [str(self._address)],
                ip_version=library.IPVersion.V6Only if self._address.version == 6 else library.IPVersion.V4Only,
            )
            addresses = _own_addresses(library) if everywhere else [str(self._address)]
            name = f"edge-server on {socket.gethostname()}".replace(".", "-")
            info = library.ServiceInfo(
                _TYPE,
                f"{name.encode()[:_MAX_NAME].decode('utf-8', 'ignore')}.{_TYPE}",
                parsed_addresses=addresses,
                port=self._port,
                server=f"{socket.gethostname().partition('.')[0]}.local.",
            )
            await self._running.async_register_service(info, allow_name_change=True)
        except (OSError, library.Error) as error:
            log.warning("--wyoming-announce: cannot announce the port: %s", error)
        else:
            log.info("announced %s at %s, port %d", info.name, ", ".join(addresses), self._port)

    async def stop(self) -> None:
        """Say that the service ends."""
        if self._running is not None:
            await self._running.async_unregister_all_services()
            await self._running.async_close()


def _own_addresses(library: Any) -> list[str]:
    """Return the IPv4 addresses of the machine that other machines may reach."""
    found = sorted(str(address) for address in library.get_all_addresses())
    return [address for address in found if not ipaddress.ip_address(address).is_loopback] or found
