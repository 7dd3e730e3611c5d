"""What `faults` and `cost` share: real replicas, an upstream, and a relay between peers.

A replica announces its peer address to the others, and they pass it on, so a relay
would be bypassed if it stood anywhere else. Here a replica listens for peers on
127.0.2.I and is told by POD_IP that it is 127.0.1.I: that is where the relay
listens, and the only address that anybody ever hears of.
"""

import asyncio
import collections
import os
import re
import signal
import subprocess
import time
from pathlib import Path

NAME = re.compile(rb"replica-(\d+)\.")


class Upstream(asyncio.Protocol):
    """Answers every request with 204 and remembers when each id came."""

    def __init__(self, arrivals):
        self.arrivals, self.rest = arrivals, b""

    @classmethod
    async def start(cls):
        """Returns the server, its port, and the list of (time, path) it fills."""
        arrivals = []
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: cls(arrivals), "127.0.0.1", 0, backlog=1000)
        return server, server.sockets[0].getsockname()[1], arrivals

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        *heads, self.rest = (self.rest + data).split(b"\r\n\r\n")
        for head in heads:
            self.arrivals.append((time.monotonic(), head.split(b" ", 2)[1]))
            self.transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")


class Replica:
    """A process, started anew as often as wanted at the same addresses."""

    def __init__(self, binary, index, port, folder, config, peers, relayed):
        self.index, self.port, self.binary = index, port, binary
        self.address = f"127.0.0.{10 + index}"
        self.peer_host = f"127.0.2.{index}" if relayed else self.address
        self.file = Path(folder) / f"{index}.yaml"
        self.log = Path(folder) / f"{index}.log"
        text = config + f"admin: {{ listen: '{self.address}:{port + 2}' }}\n"
        text += f"telemetry: {{ listen: '{self.address}:{port + 3}' }}\n"
        if peers:
            known = ", ".join(f'"{peer}"' for peer in peers)
            text += (
                f"replication: {{ listen: '{self.peer_host}:{port + 1}', insecure: true,\n"
                f"  peers: {{ static: [{known}] }} }}\n"
            )
        self.file.write_text(text.replace("LISTEN", f"{self.address}:{port}"))
        self.env = {
            **os.environ,
            "TIDEGATE_WORKERS": "1",
            "POD_NAME": f"replica-{index}.",
            "POD_IP": f"127.0.1.{index}" if relayed else self.address,
        }
        self.process = None

    def start(self):
        with open(self.log, "a") as log:
            command = [self.binary, "run", "-c", str(self.file)]
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=self.env)

    async def get(self, path):
        """Status and body of a telemetry page; (0, "") if there is no answer."""
        try:
            reader, writer = await asyncio.open_connection(self.address, self.port + 3)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            answer = (await asyncio.wait_for(reader.read(), 5)).decode()
            writer.close()
            head, _, body = answer.partition("\r\n\r\n")
            return int(head.split(" ", 2)[1]), body
        except (OSError, IndexError, asyncio.TimeoutError):
            return 0, ""

    async def metrics(self):
        """Every sample by its name with labels."""
        _, body = await self.get("/metrics")
        pairs = (line.rsplit(" ", 1) for line in body.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    async def ready(self, peers=0):
        """Waits until it is ready and has a live session with so many peers."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.process.poll() is None:
            if (await self.get("/readyz"))[0] == 200:
                live = (await self.metrics()).get('tidegate_peers{state="live"}', 0)
                if not peers or live == peers:
                    return
            await asyncio.sleep(0.05)
        raise SystemExit(f"replica {self.index} is not ready:\n{self.log.read_text()[-3000:]}")

    def signal(self, number):
        self.process.send_signal(number)

    async def ended(self, seconds=20):
        """Waits for the process to end by itself."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"replica {self.index} does not end")
            await asyncio.sleep(0.01)
        return self.process.returncode

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


class Link(asyncio.Protocol):
    """One end of a relayed connection. What it reads goes to the other end."""

    def __init__(self, relay, target, other=None):
        self.relay, self.target, self.other = relay, target, other
        self.source, self.early, self.late = None, b"", collections.deque()
        self.transport, self.held = None, False

    def connection_made(self, transport):
        self.transport = transport
        self.relay.links.add(self)

    def data_received(self, data):
        self.relay.bytes += len(data)
        self.relay.chunks += 1
        if self.other is None:
            # Whoever dials says its name in its first frame.
            self.early += data
            name = NAME.search(self.early)
            if self.source is None and name:
                self.source = int(name[1])
                asyncio.ensure_future(self.connect())
        elif self.relay.delay or self.late or self.held:
            self.late.append((time.monotonic() + self.relay.delay, data))
            if len(self.late) == 1:
                self.schedule()
        else:
            self.pass_on(data)

    async def connect(self):
        if self.relay.is_cut(self):
            return self.transport.abort()
        host = f"127.0.2.{self.target}"
        try:
            _, other = await asyncio.get_running_loop().create_connection(
                lambda: Link(self.relay, self.target, self), host, self.relay.port
            )
        except OSError:
            return self.transport.abort()
        other.source, self.other = self.source, other
        data, self.early = self.early, b""
        self.relay.bytes -= len(data)
        for link in (self, other):
            link.hold(self.relay.is_stalled(link))
        self.data_received(data)
        if self.transport.is_closing():
            other.transport.abort()

    def pass_on(self, data):
        if not self.other.transport.is_closing():
            self.other.transport.write(data)

    def schedule(self):
        wait = max(0, self.late[0][0] - time.monotonic())
        asyncio.get_running_loop().call_later(wait, self.flush)

    def flush(self):
        while self.late and not self.held and self.late[0][0] <= time.monotonic():
            self.pass_on(self.late.popleft()[1])
        if self.late and not self.held:
            self.schedule()

    def hold(self, held):
        """Like a network that is gone: nothing is read, and nothing is closed."""
        was, self.held = self.held, held
        if self.transport.is_closing():
            return
        if held:
            self.transport.pause_reading()
        elif was:
            self.transport.resume_reading()
            self.flush()

    def connection_lost(self, _error):
        self.relay.links.discard(self)
        if self.other and not self.other.transport.is_closing():
            # What is delayed arrives before the end does.
            last = max(0, self.late[-1][0] - time.monotonic()) if self.late else 0
            asyncio.get_running_loop().call_later(last, self.other.transport.close)


class Relay:
    """Stands before the peer listener of every replica: 127.0.1.I to 127.0.2.I."""

    def __init__(self, count, port):
        self.count, self.port = count, port
        self.links, self.servers = set(), {}
        self.delay, self.bytes, self.chunks = 0, 0, 0
        self.stalled = self.cut = lambda a, b: False

    async def start(self):
        for index in range(1, self.count + 1):
            await self.accept(index)

    async def accept(self, index):
        self.servers[index] = await asyncio.get_running_loop().create_server(
            lambda: Link(self, index), f"127.0.1.{index}", self.port
        )

    def refuse(self, index):
        self.servers.pop(index).close()

    def is_stalled(self, link):
        return link.source is not None and self.stalled(link.source, link.target)

    def is_cut(self, link):
        return link.source is not None and self.cut(link.source, link.target)

    def stall(self, between):
        """Holds everything between two replicas of which `between` is true."""
        self.stalled = between
        for link in list(self.links):
            if link.other:
                link.hold(self.is_stalled(link))

    def sever(self, between):
        """Closes what is between such replicas, now and whenever it is dialled."""
        self.cut = between
        for link in list(self.links):
            if self.is_cut(link):
                link.transport.abort()

    def stop(self):
        for index in list(self.servers):
            self.refuse(index)
        for link in list(self.links):
            link.transport.abort()


def cluster(binary, count, port, folder, config, relayed=False, lone=False):
    """Replicas that know each other, not yet started."""
    hosts = [f"127.0.1.{i}" if relayed else f"127.0.0.{10 + i}" for i in range(1, count + 1)]
    peers = [] if lone or count == 1 else [f"{host}:{port + 1}" for host in hosts]
    return [
        Replica(binary, i, port, folder, config, peers, relayed) for i in range(1, count + 1)
    ]
