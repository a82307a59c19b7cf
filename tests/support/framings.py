"""Malformed HTTP/2 input for gRPC servers."""

import random
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, CONTINUATION, RST_STREAM, WINDOW_UPDATE = 0, 1, 4, 6, 7, 9, 3, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


ANY_CALL = {
    b":method": b"POST", b":scheme": b"http", b":path": b"/", b":authority": b"fuzz",
    b"content-type": b"application/grpc", b"te": b"trailers",
}  # fmt: skip


def block(fields: dict[bytes, bytes], indexed: bool = False) -> bytes:
    """Literal HPACK fields, uncompressed: those of any call, and `fields`. `indexed`: add them to the dynamic table."""
    kind = b"\x40" if indexed else b"\0"
    return b"".join(kind + _string(name) + _string(value) for name, value in (ANY_CALL | fields).items())


def indexed(fields: dict[bytes, bytes]) -> bytes:
    """The same fields from the dynamic table, which must have them and nothing else."""
    return bytes(0x80 | (61 + place) for place in range(len(ANY_CALL | fields), 0, -1))


def _string(text: bytes) -> bytes:
    """An HPACK string literal."""
    length, digits = len(text) - 127, b""
    if length < 0:
        return bytes([len(text)]) + text
    while length >= 128:
        length, digits = length // 128, digits + bytes([length % 128 + 128])
    return b"\x7f" + digits + bytes([length]) + text


def headers(path: str, **more: str) -> bytes:
    """A block of literal HPACK headers, uncompressed."""
    return block({b":path": path.encode()} | {name.encode(): value.encode() for name, value in more.items()})


def framings(path: str) -> dict[str, bytes]:
    """Malformed bytes by kind of fault."""
    begun = PREFACE + frame(SETTINGS, 0, 0)
    called = begun + frame(HEADERS, END_HEADERS, 1, headers(path))
    compressed = begun + frame(HEADERS, END_HEADERS, 1, headers(path, **{"grpc-encoding": "gzip"}))
    noise = random.Random(0)
    return {
        "noise": noise.randbytes(5000),
        "http1": b"GET / HTTP/1.1\r\nHost: fuzz\r\n\r\n",
        "noise_after_the_preface": PREFACE + noise.randbytes(5000),
        "random_frames": begun + b"".join(frame(noise.randrange(12), noise.randrange(256), noise.randrange(6),
                                                noise.randbytes(noise.randrange(60))) for _ in range(50)),
        "no_headers": begun + frame(DATA, END_STREAM, 1, bytes(5)),
        "broken_headers": begun + frame(HEADERS, END_HEADERS, 1, noise.randbytes(200)),
        "headers_without_end": begun + frame(HEADERS, 0, 1, headers(path)) + frame(PING, 0, 0, bytes(8)),
        "many_headers": begun + frame(HEADERS, 0, 1, headers(path)) + frame(CONTINUATION, 0, 1, b"\0\1x\1y" * 3000) * 9,
        "longer_than_it_says": called + frame(DATA, END_STREAM, 1, b"\0\0\0\0\2" + bytes(40)),
        "shorter_than_it_says": called + frame(DATA, END_STREAM, 1, b"\0\0\0\0\x28" + bytes(2)),
        "says_4_gib": called + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff" + bytes(20)),
        "compressed_by_nothing": called + frame(DATA, END_STREAM, 1, b"\1\0\0\0\4" + bytes(4)),
        "compressed_and_broken": compressed + frame(DATA, END_STREAM, 1, b"\1\0\0\0\x10" + noise.randbytes(16)),
        "unknown_flag": called + frame(DATA, END_STREAM, 1, b"\7\0\0\0\0"),
        "no_message": called + frame(DATA, END_STREAM, 1),
        "two_messages": called + frame(DATA, END_STREAM, 1, bytes(10)),
        "resets": begun + b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, headers(path)) +
                                   frame(RST_STREAM, 0, 2 * i + 1, bytes(4)) for i in range(300)),
        "settings_and_pings": begun + (frame(SETTINGS, 0, 0) + frame(PING, 0, 0, bytes(8))) * 2000,
        "no_window": begun + frame(WINDOW_UPDATE, 0, 0, bytes(4)) + frame(GOAWAY, 0, 0, bytes(8)),
    }  # fmt: skip
