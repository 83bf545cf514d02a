"""Where a webhook may be: every address that its name resolves to is checked, and only such an address is connected to.

A name that resolves to something else at the second look (DNS rebinding) gains nothing: there is no second look.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Never, whatever is allowed: what clouds tell a machine about itself, credentials included.
_METADATA: Final = frozenset(
    ipaddress.ip_address(one)
    for one in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192")
)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def refusal(address: IPAddress, allowed: Sequence[Network]) -> str | None:
    """Why nothing is sent to ``address``; None if it may be."""
    for one in _all_meanings(address):
        if one in _METADATA or one.is_link_local:
            return f"{address} is a link-local or metadata address"
        if one.is_multicast or one.is_unspecified or (one.is_reserved and not one.is_loopback):
            return f"{address} is no address of a host"
        if not any(one.version == network.version and one in network for network in allowed):
            return f"{address} is in no network of `allow`"
    return None


def _all_meanings(address: IPAddress) -> list[IPAddress]:
    """What a packet to ``address`` may reach: the address itself, or the IPv4 one that is written into it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    inside: list[IPAddress] = [address]
    if address.sixtofour is not None:
        inside.append(address.sixtofour)
    if address.teredo is not None:
        inside.extend(address.teredo)
    return inside
