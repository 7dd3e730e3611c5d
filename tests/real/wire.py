"""What `soak` and `abuse` share: HTTP/2 as frames, and an upstream for every protocol.

Field blocks are written as literals without any compression and read only as far as
their first byte, which is enough for a status of 200.
"""

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9,
)  # fmt: skip
END_STREAM, ACK, END_HEADERS = 1, 1, 4
STATUS_200 = 0x88


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def block(*fields):
    """A field block of literals that are not indexed; every text below 127 bytes."""
    out = bytearray()
    for name, value in fields:
        out += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(out)


def request(method, path, *fields):
    """The field block of a request."""
    head = ((":method", method), (":scheme", "http"), (":authority", "app"), (":path", path))
    return block(*head, *fields)


GRPC = (("content-type", "application/grpc"), ("te", "trailers"))


class Frames(asyncio.Protocol):
    """One side of a connection of HTTP/2, to be completed by `on_frame`."""

    def __init__(self):
        self.buffer, self.closed = b"", asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def send(self, kind, flags, stream, payload=b""):
        if not self.transport.is_closing():
            self.transport.write(frame(kind, flags, stream, payload))

    def data_received(self, data):
        self.buffer += data
        while len(self.buffer) >= 9:
            length = int.from_bytes(self.buffer[:3], "big")
            if len(self.buffer) < 9 + length:
                return
            kind, flags, stream = struct.unpack(">BBI", self.buffer[3:9])
            payload, self.buffer = self.buffer[9 : 9 + length], self.buffer[9 + length :]
            if kind == SETTINGS and not flags & ACK:
                self.send(SETTINGS, ACK, 0)
            elif kind == PING and not flags & ACK:
                self.send(PING, ACK, 0, payload)
            elif kind == DATA and payload:
                grown = struct.pack(">I", len(payload))
                self.send(WINDOW_UPDATE, 0, 0, grown)
                if not flags & END_STREAM:
                    self.send(WINDOW_UPDATE, 0, stream, grown)
            self.on_frame(kind, flags, stream, payload)

    def connection_lost(self, _error):
        if not self.closed.done():
            self.closed.set_result(None)


class Client(Frames):
    """A client; `call` waits for the end of a stream."""

    def __init__(self):
        super().__init__()
        self.next, self.waiting, self.goaway = 1, {}, None

    @classmethod
    async def connect(cls, host, port):
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, host, port)
        client.transport.write(PREFACE + frame(SETTINGS, 0, 0))
        return client

    def open(self, fields, end=True):
        """Opens a stream; its number and a future of (first byte of the head, bytes, end)."""
        stream, self.next = self.next, self.next + 2
        future = asyncio.get_running_loop().create_future()
        self.waiting[stream] = [future, None, 0]
        self.send(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, fields)
        return stream, future

    def on_frame(self, kind, flags, stream, payload):
        if kind == GOAWAY:
            self.goaway = struct.unpack(">I", payload[4:8])[0]
        state = self.waiting.get(stream)
        if state is None:
            return
        if kind == HEADERS and state[1] is None:
            state[1] = payload[0]
        elif kind == DATA:
            state[2] += len(payload)
        if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.finish(stream, "reset" if kind == RST_STREAM else "end")

    def finish(self, stream, how):
        future, first, count = self.waiting.pop(stream)
        if not future.done():
            future.set_result((first, count, how))

    def connection_lost(self, error):
        super().connection_lost(error)
        for stream in list(self.waiting):
            self.finish(stream, "closed")


class Upstream(Frames):
    """Echoes gRPC and WebSockets; answers any other request with 1 KiB, /big with
    1 MiB, and /stream with chunks until the other side has enough."""

    http2 = None

    @classmethod
    async def start(cls):
        """Returns the server and its port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(cls, "127.0.0.1", 0, backlog=1000)
        return server, server.sockets[0].getsockname()[1]

    def data_received(self, data):
        if self.http2:
            return super().data_received(data)
        if self.http2 is None:
            self.buffer += data
            if PREFACE.startswith(self.buffer[: len(PREFACE)]):
                if len(self.buffer) >= len(PREFACE):
                    self.http2, rest, self.buffer = True, self.buffer[len(PREFACE) :], b""
                    self.send(SETTINGS, 0, 0)
                    super().data_received(rest)
                return
            self.http2, data, self.buffer = False, self.buffer, b""
            self.reader = asyncio.StreamReader()
            self.task = asyncio.ensure_future(self.serve())
        self.reader.feed_data(data)

    def connection_lost(self, error):
        super().connection_lost(error)
        if self.http2 is False:
            self.reader.feed_eof()
            self.task.cancel()

    def on_frame(self, kind, flags, stream, payload):
        if kind == HEADERS:
            head = b"\x88" + block(("content-type", "application/grpc"))
            self.send(HEADERS, END_HEADERS, stream, head)
        elif kind == DATA and payload:
            self.send(DATA, 0, stream, payload)
        if kind in (HEADERS, DATA) and flags & END_STREAM:
            self.send(HEADERS, END_HEADERS | END_STREAM, stream, block(("grpc-status", "0")))

    async def serve(self):
        try:
            while True:
                head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
                if b"upgrade: websocket" in head:
                    self.transport.write(
                        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n"
                        b"upgrade: websocket\r\n\r\n"
                    )
                    while data := await self.reader.read(65536):
                        self.transport.write(data)
                    return self.transport.close()
                await self.body(head)
                if head.split(b" ", 2)[1].startswith(b"/stream"):
                    self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    while not self.transport.is_closing():
                        if self.transport.get_write_buffer_size() < 1 << 20:
                            self.transport.write(b"400\r\n" + 1024 * b"x" + b"\r\n")
                        await asyncio.sleep(0.01)
                    return
                size = 1 << 20 if head.split(b" ", 2)[1] == b"/big" else 1024
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + size * b"x"
                )
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            self.transport.close()

    async def body(self, head):
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await self.reader.readexactly(int(line.split(b":")[1]))
            elif line.startswith(b"transfer-encoding:"):
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    await self.reader.readexactly(size + 2)
                await self.reader.readuntil(b"\r\n")
