"""A proxy for one HTTP server that delays, refuses and counts requests: `python -m delaying_proxy PORT SECONDS`.

It prints its own port. `GET /__set?delay=0.02&refuse=0.3` changes what it does, and `GET /__counts` returns requests by
method, and the bytes of the bodies that it has passed back.
"""

import asyncio
import collections
import json
import random
import sys
import urllib.parse
import urllib.request

_REFUSAL = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy:
    def __init__(self, port, delay):
        self.port, self.delay, self.refuse = port, delay, 0.0
        self.counts = collections.Counter()
        self._random = random.Random(0)

    async def serve(self, reader, writer):
        backend = None
        try:
            while head := await self._head(reader):
                method, target, fields = head[1]
                if target.startswith("/__"):
                    await self._answer(writer, b"200 OK", self._control(target))
                    continue
                self.counts[method] += 1
                await asyncio.sleep(self.delay)
                length = int(fields.get("content-length", 0))
                if self._random.random() < self.refuse:
                    await reader.readexactly(length)
                    self.counts["refused"] += 1
                    await self._answer(writer, b"503 Slow Down", _REFUSAL)
                    continue
                backend = backend or await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
                backend[1].write(head[0])
                if fields.get("expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await self._pump(reader, backend[1], length)
                raw, (_, status, answer) = await self._head(backend[0])
                while status == "100":
                    raw, (_, status, answer) = await self._head(backend[0])
                writer.write(raw)
                if method != "HEAD" and status not in ("204", "304"):
                    if "content-length" in answer:
                        length = int(answer["content-length"])
                        self.counts["bytes"] += length
                        await self._pump(backend[0], writer, length)
                    elif answer.get("transfer-encoding") == "chunked":
                        await self._chunks(backend[0], writer)
                await writer.drain()
                if answer.get("connection") == "close":
                    break
        except (ConnectionError, asyncio.IncompleteReadError, TypeError):
            pass
        finally:
            for one in filter(None, (writer, backend and backend[1])):
                one.close()

    async def _head(self, reader):
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = raw.decode("latin-1").split("\r\n")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }
        method, target, *_ = first.split(" ")
        return raw, (method, target, fields)

    async def _pump(self, reader, writer, length):
        while length > 0:
            part = await reader.read(min(length, 1 << 20))
            if not part:
                raise ConnectionError
            writer.write(part)
            await writer.drain()
            length -= len(part)

    async def _chunks(self, reader, writer):
        while True:
            line = await reader.readuntil(b"\r\n")
            writer.write(line)
            length = int(line.split(b";")[0], 16)
            await self._pump(reader, writer, length + 2)
            if not length:
                return

    def _control(self, target):
        path, _, query = target.partition("?")
        if path == "/__set":
            for name, value in urllib.parse.parse_qsl(query):
                setattr(self, name, float(value))
        return json.dumps(self.counts).encode()

    async def _answer(self, writer, status, body):
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()


async def main(port, delay):
    server = await asyncio.start_server(Proxy(port, delay).serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def ask(url, path):
    """Returns what a proxy at a URL answers to one of its own paths."""
    with urllib.request.urlopen(url + path) as answer:
        return collections.Counter(json.loads(answer.read()))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
