"""The kernel of the GPU proof, without a GPU: its text is carried out here, instruction by instruction, and compared with what the
proof expects. The fake driver knows it by name only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

import pytest

from tests.gpu.device import KERNEL, PTX, THREADS, mixed

WORD = 0xFFFFFFFF
BASE = 0x7F0000000000


OPERATIONS: Mapping[str, Callable[..., int]] = {
    "mov.u32": lambda a: a,
    "cvta.to.global.u64": lambda a: a,
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "mul.wide.u32": lambda a, b: a * b,
    "setp.ge.u32": lambda a, b: int(a >= b),
    "add.u64": lambda a, b: a + b,
    "add.u32": lambda a, b: a + b & WORD,
    "shl.b32": lambda a, b: a << b & WORD,
    "shr.u32": lambda a, b: a >> b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
}


class Thread:
    """One thread of the kernel. `memory` is what the address BASE points to."""

    def __init__(self, memory: bytearray, parameters: Mapping[str, int], special: Mapping[str, int]) -> None:
        self.memory = memory
        self.parameters = parameters
        self.registers: dict[str, int] = dict(special)

    def value(self, operand: str) -> int:
        return self.registers[operand] if operand.startswith("%") else int(operand)

    def place(self, operand: str) -> slice:
        start = self.registers[operand.strip("[]")] - BASE
        assert 0 <= start <= len(self.memory) - 4, "outside of the allocation"
        return slice(start, start + 4)

    def run(self, lines: list[str]) -> None:
        at = 0
        while True:
            line = lines[at]
            at += 1
            if match := re.fullmatch(r"@(%\w+) bra (\w+);", line):
                if self.registers[match[1]]:
                    at = lines.index(f"{match[2]}:")
                continue
            if line.endswith(":"):
                continue
            name, _, rest = line.rstrip(";").partition(" ")
            if name == "ret":
                return
            to, *sources = [part.strip() for part in rest.split(",")]
            if name.startswith("ld.param"):
                self.registers[to] = self.parameters[sources[0].strip("[]")]
            elif name == "ld.global.u32":
                self.registers[to] = int.from_bytes(self.memory[self.place(sources[0])], "little")
            elif name == "st.global.u32":
                self.memory[self.place(to)] = self.value(sources[0]).to_bytes(4, "little")
            else:
                self.registers[to] = OPERATIONS[name](*map(self.value, sources))


def launch(data: bytes, count: int, first: int, key: int, blocks: int) -> bytes:
    body = PTX.decode().split("{", 1)[1].rsplit("}", 1)[0]
    lines = [line for raw in body.splitlines() if (line := raw.strip()) and not line.startswith(".")]
    memory = bytearray(data)
    for block in range(blocks):
        for thread in range(THREADS):
            special = {"%ctaid.x": block, "%ntid.x": THREADS, "%tid.x": thread}
            Thread(memory, {"data": BASE, "count": count, "first": first, "key": key}, special).run(lines)
    return bytes(memory)


@pytest.mark.parametrize(("first", "key"), [(0, 0), (12345, 7), (0xFFFFFF00, 0xDEADBEEF)])
def test_the_kernel_computes_what_the_proof_expects(first: int, key: int) -> None:
    words = 2 * THREADS - 100
    data = os.urandom(4 * words + 40)
    assert launch(data, words, first, key, blocks=2) == mixed(data[: 4 * words], key, first) + data[4 * words :]


def test_the_kernel_has_the_name_and_the_parameters_that_are_used() -> None:
    text = PTX.decode()
    assert f".visible .entry {KERNEL.decode()}(" in text
    assert re.findall(r"\.param \.(\w+) (\w+)", text) == [("u64", "data"), ("u32", "count"), ("u32", "first"), ("u32", "key")]


def test_every_word_depends_on_itself_its_place_and_the_key() -> None:
    data = bytes(8)
    assert mixed(data, 0) == (0).to_bytes(4, "little") + (1).to_bytes(4, "little")
    assert mixed(b"\x01\0\0\x80" * 2, 0)[:4] == (0x80000001 << 5 & WORD | 0x80000001 >> 27).to_bytes(4, "little")
    assert mixed(data, 1) != mixed(data, 2)
