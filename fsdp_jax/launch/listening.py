"""Where process 0 listens: at the address of the run alone, or, with a secret, at every one."""

import contextlib
import errno
import ipaddress
import socket
from dataclasses import dataclass

from fsdp_jax.errors import ConfigError

BACKLOG = 1024  # connections that the kernel holds until they are accepted
# A machine that is gone is noticed after 10 + 6 x 5 seconds; a broken network may last as long.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 40_000}
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # no address of this machine


@dataclass(frozen=True)
class Listening:
    """The sockets that process 0 listens with.

    Attributes:
        host: whose addresses they are; empty for every interface.
        sockets: one for each address.
        warning: what the user has to know of these addresses; mostly empty.

    """

    host: str
    sockets: list[socket.socket]
    warning: str = ""

    def free_port(self, preferred: int) -> int:
        """Finds a free port at the same addresses: the preferred one, or any if it is taken.

        Raises OSError where there is none.
        """
        address = self.sockets[0].getsockname()
        for attempt in range(10):
            port = preferred
            if attempt:
                with socket.socket(self.sockets[0].family) as probe:
                    probe.bind((address[0], 0, *address[2:]))
                    port = probe.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for each in _open_sockets(self.host, port):
                    each.close()
                return port
        raise OSError("no port is free")


def listen(host: str, port: int, *, has_secret: bool) -> Listening:
    """Listens at the addresses of the host that are this machine's.

    Where none is, or no other machine reaches them though the host is a name, as some systems give
    a machine's own name a loopback address: at every interface if there is a secret. Without one
    only the run's own address is opened, and the user is told.

    Raises:
        ConfigError: no address of the host is this machine's, and there is no secret.
        OSError: the port is in use.

    """
    sockets = _open_sockets(host, port)
    addresses = [ipaddress.ip_address(each.getsockname()[0].split("%")[0]) for each in sockets]
    if any(each.is_unspecified for each in addresses):
        if has_secret:
            return Listening(host, sockets)
        what = "whoever reaches this machine can end the run: it listens on every interface, "
        return Listening(host, sockets, what + "without cluster.secret")
    is_loopback = bool(addresses) and all(each.is_loopback for each in addresses)
    is_misleading = is_loopback and not _is_meant_as_loopback(host)
    if sockets and not is_misleading:
        return Listening(host, sockets)
    # A name that means another address to the other machines than to this one.
    if has_secret:
        for each in sockets:
            each.close()
        what = f"no address of {host} is this machine's"
        if is_loopback:
            what = f"{host} is {addresses[0]} on this machine, which no other reaches"
        what += (
            ": process 0 listens on every interface, and asks for the secret; jax's service does "
        )
        what += "too, and asks for none"
        return Listening("", _open_sockets("", port), what)
    fix = "give the address by which the others reach process 0, or set cluster.secret: then it "
    fix += "listens on every interface"
    if is_loopback:
        what = f"{host} is {addresses[0]} on this machine, which no other reaches: {fix}"
        return Listening(host, sockets, what)
    raise ConfigError(
        "process 0 cannot listen at an address that is not its machine's",
        where="cluster.coordinator",
        got=f"{host}: {_described(host)}",
        fix=fix,
    )


def enable_keep_alive(connection: socket.socket) -> None:
    """Makes the kernel close a connection when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_meant_as_loopback(host: str) -> bool:
    """Tells whether a host is a loopback address by itself, for the processes of one machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _open_sockets(host: str, port: int) -> list[socket.socket]:
    """Opens a socket for each address of the host that is this machine's; "" stands for all.

    Raises OSError if the port is in use at one of them.
    """
    if not host:
        if socket.has_dualstack_ipv6():
            return [
                socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
                )
            ]
        return [socket.create_server(("", port), backlog=BACKLOG)]
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for family, address in _addresses(host, port):
            try:
                each = socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno in NOT_HERE:
                    continue
                raise
            sockets.append(stack.enter_context(each))
        stack.pop_all()  # all are open
    return sockets


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    """Lists (family, address) of a host, each once; empty if its name is not known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _described(host: str) -> str:
    """Formats the addresses of a host, which are another machine's."""
    found = [str(address[0]) for _, address in _addresses(host, 0)]
    if not found:
        return "no address is known for it"
    return f"{', '.join(found)}, not of this machine"
