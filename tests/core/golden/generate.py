"""Makes the golden vectors beside this file: ``python tests/core/golden/generate.py``.

Written straight from the module docstrings of ``kvstore.core.spec``, ``keys`` and ``checksum``, with nothing imported from
them: so the vectors hold the code to its description, and show another language all that it needs. Bytes are hex. Vectors are
only ever added: a changed one means that every stored block and every peer of another version is lost.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import xxhash

HERE = Path(__file__).resolve().parent

Spec = dict[str, Any]

BASE: Spec = {
    "model": "meta-llama/Llama-3.1-8B",
    "weights_epoch": "",
    "dtype": "bf16",
    "block_tokens": 64,
    "layers": 32,
    "layer_block_bytes": 262144,
    "layout": "opaque",
    "layout_version": 1,
    "shard_rank": 0,
    "shard_count": 1,
    "hash_algorithm": "xxh3-128",
    "tenant": "",
    "salt": "",
}
CHANGES: list[Spec] = [
    {},
    {"model": "modèle/ü-模型"},
    {"weights_epoch": "step-1200"},
    {"dtype": "fp8_e4m3"},
    {"block_tokens": 16},
    {"layers": 61},
    {"layer_block_bytes": 73728},
    {"layout": "kv-split"},
    {"layout_version": 2},
    {"shard_count": 8},
    {"shard_rank": 7, "shard_count": 8},
    {"hash_algorithm": "sha256-128"},
    {"tenant": "team-a"},
    {"salt": "00ff10"},
    {"model": "m", "weights_epoch": "e", "dtype": "d", "layout": "l", "tenant": "t", "salt": "73", "layout_version": 4294967295},
]


def namespace(spec: Spec) -> bytes:
    content = b"kvstore/namespace/1"
    for number, name in enumerate(BASE, start=1):
        value = spec[name]
        if name == "salt":
            encoded = bytes.fromhex(value)
        elif isinstance(value, int):
            encoded = struct.pack("<Q", value)
        else:
            encoded = value.encode("utf-8")
        content += struct.pack("<B", number) + struct.pack("<I", len(encoded)) + encoded
    return hashlib.sha256(content).digest()[:16]


def extra(parts: list[tuple[str, str]]) -> bytes:
    content = b""
    for kind, value in parts:
        name, payload = kind.encode("utf-8"), bytes.fromhex(value)
        content += struct.pack("<H", len(name)) + name + struct.pack("<I", len(payload)) + payload
    return content


def chain(spec: Spec, tokens: list[int], extras: dict[int, list[tuple[str, str]]]) -> list[str]:
    previous, keys = namespace(spec), []
    size = spec["block_tokens"]
    for block in range(len(tokens) // size):
        content = previous + b"".join(struct.pack("<I", token) for token in tokens[block * size : (block + 1) * size])
        content += extra(extras.get(block, []))
        if spec["hash_algorithm"] == "sha256-128":
            previous = hashlib.sha256(content).digest()[:16]
        else:
            previous = xxhash.xxh3_128(content).digest()  # canonical: big-endian
        keys.append(previous.hex())
    return keys


def tail(spec: Spec, tokens: list[int], parent: bytes | None) -> str:
    content = parent if parent is not None else namespace(spec)
    content += b"".join(struct.pack("<I", token) for token in tokens) + bytes(4 * (spec["block_tokens"] - len(tokens)))
    content += b"\0\0tail" + struct.pack("<I", len(tokens))
    if spec["hash_algorithm"] == "sha256-128":
        return hashlib.sha256(content).digest()[:16].hex()
    return xxhash.xxh3_128(content).hexdigest()


def token_rows() -> list[tuple[list[int], dict[int, list[tuple[str, str]]]]]:
    counting = list(range(16))
    mixed = [(7919 * position * position + 104729) % 2**32 for position in range(70)]
    return [
        ([], {}),
        ([1, 2, 3], {}),
        (counting, {}),
        ([0] * 16, {}),
        ([2**32 - 1] * 16, {}),
        (mixed, {}),
        (mixed, {0: [("lora", "a1b2c3")]}),
        (mixed, {2: [("image", "00" * 32), ("image", "ff" * 32)]}),
        (mixed, {0: [("salt", "")], 3: [("lora", "01"), ("salt", "02")]}),
    ]


def checksum_rows() -> list[dict[str, Any]]:
    rows = []
    short = ((1, 1), (1, 4096), (3, 17), (4, 240), (2, 241), (4, 1024), (61, 64))
    for layers, size in (*short, (2, 4097), (1, 16384), (2, 65536), (1, 1 << 20)):
        # what the block holds: byte i is (i * 31 + i // 256) mod 256
        block = bytes((position * 31 + position // 256) % 256 for position in range(layers * size))
        digests = [xxhash.xxh3_64(block[at : at + size]).intdigest() for at in range(0, len(block), size)]
        packed = b"".join(struct.pack("<Q", digest) for digest in digests).hex()
        rows.append({"layers": layers, "layer_block_bytes": size, "checksums": packed})
    return rows


def write(name: str, what: str, vectors: list[Any]) -> None:
    (HERE / name).write_text(json.dumps({"what": what, "vectors": vectors}, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    specs: list[Spec] = [{**BASE, **change} for change in CHANGES]
    write(
        "namespaces.json",
        "CacheSpec (salt in hex) -> namespace digest; encoding: kvstore/core/spec.py",
        [{"spec": spec, "namespace": namespace(spec).hex()} for spec in specs],
    )
    keys = []
    for algorithm in ("xxh3-128", "sha256-128"):
        spec = {**BASE, "block_tokens": 16, "hash_algorithm": algorithm}
        for tokens, extras in token_rows():
            row = {"spec": spec, "tokens": tokens, "extras": {str(block): parts for block, parts in extras.items()}}
            keys.append({**row, "keys": chain(spec, tokens, extras)})
    write("keys.json", "tokens and extras (by block: kind, value in hex) -> keys; encoding: kvstore/core/keys.py", keys)
    tails = []
    for algorithm in ("xxh3-128", "sha256-128"):
        spec = {**BASE, "block_tokens": 16, "hash_algorithm": algorithm}
        for tokens, parent in (([0], None), ([1, 2, 3], b"p" * 16), ([2**32 - 1] * 15, b"\0" * 16)):
            shown = parent.hex() if parent is not None else None
            tails.append({"spec": spec, "tokens": tokens, "parent": shown, "key": tail(spec, tokens, parent)})
    write("tails.json", "tokens of a partial block and the key before it -> key; encoding: kvstore/core/keys.py", tails)
    write(
        "checksums.json",
        "block whose byte i is (i * 31 + i // 256) mod 256 -> packed checksums; encoding: kvstore/core/checksum.py",
        checksum_rows(),
    )


if __name__ == "__main__":
    main()
