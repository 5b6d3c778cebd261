"""One-to-one translation of addresses, as clouds do it: a host's own address is not the one that
others reach it by, and it has no interface with that one.

``python -m tests.network.translation INSIDE OUTSIDE`` runs in the namespace between the host and
the network, which sends it what goes either way through the device ``tun0``.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

#: From <linux/if_tun.h>: sets the device of a descriptor; packets of IP, without a header before.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DEVICE = b"tun0"
_MAX_PACKET_BYTES = 65_536
#: Offsets in an IPv4 header: its checksum, source and destination; the protocol's number.
_CHECKSUM, _SOURCE, _DESTINATION, _PROTOCOL = 10, 12, 16, 9
#: Offsets of the checksum behind the header, which covers addresses, by protocol.
_COVERED = {socket.IPPROTO_TCP: 16, socket.IPPROTO_UDP: 6}


def _sum_of(address: bytes) -> int:
    high, low = struct.unpack("!HH", address)
    return int(high + low)


def _adjust(packet: bytearray, offset: int, change: int) -> None:
    """Bring a checksum up to date with an address that was replaced (RFC 1624)."""
    (old,) = struct.unpack_from("!H", packet, offset)
    total = (~old & 0xFFFF) + change
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, offset, ~total & 0xFFFF)


def translate(packet: bytearray, inside: bytes, outside: bytes) -> bool:
    """Replace the inside address as source, or the outside one as destination; False if neither."""
    if packet[0] >> 4 != 4:
        return False
    for offset, old, new in ((_SOURCE, inside, outside), (_DESTINATION, outside, inside)):
        if packet[offset : offset + 4] == old:
            packet[offset : offset + 4] = new
            # Subtraction in ones' complement is the addition of the complement.
            change = _sum_of(new) + 2 * 0xFFFF - _sum_of(old)
            _adjust(packet, _CHECKSUM, change)
            if covered := _COVERED.get(packet[_PROTOCOL]):
                _adjust(packet, (packet[0] & 15) * 4 + covered, change)
            return True
    return False


def main(inside: str, outside: str) -> None:
    """Translate until the process is ended."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    flags = _IFF_TUN | _IFF_NO_PI
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, flags))
    addresses = socket.inet_aton(inside), socket.inet_aton(outside)
    print("ready", flush=True)
    while True:
        packet = bytearray(os.read(device, _MAX_PACKET_BYTES))
        if translate(packet, *addresses):
            os.write(device, packet)


if __name__ == "__main__":
    main(*sys.argv[1:3])
