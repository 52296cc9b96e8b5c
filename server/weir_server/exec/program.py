"""A forward as a program: model/decoder.py's equations are traced once into a list of operations, which program.c runs.

Tracing calls the equations with names of values instead of tensors. What is asked of the operations is written down, each value
gets a buffer that no other value needs at the time, and from then on a forward is one call: no Python between two operations,
no tensor made, all threads woken once. Buffers grow to the next power of two of rows and stay.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch

from weir_server.exec.gemm import NativeLinear
from weir_server.exec.library import Op, Run
from weir_server.exec.step import UnsupportedError
from weir_server.model.config import DecoderConfig
from weir_server.model.decoder import Forward
from weir_server.model.linear import Linear

LEAST_ROWS = 16
"""Rows that the first buffers hold."""

CODES = {name: code for code, name in enumerate(("pick", "norm", "product", "attention", "gated", "capped"))}


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """The name of [rows, width] floats: of all tokens of the step, or of those picked for the head."""

    width: int
    picked: bool = False


@dataclass(slots=True)
class Call:
    """An operation that was asked for. `inputs` and `out` are values; `fields` are those of Op that are known by now."""

    code: str
    inputs: tuple[Value | None, Value | None]
    out: Value
    fields: dict[str, Any]


class Tracer:
    """model.decoder.Ops over values. See program.c for what an operation does."""

    def __init__(self, config: DecoderConfig, layers: list[tuple[int, int]]) -> None:
        """`layers`: of each, the number of its attention type, and floats from a block's start to its page."""
        self.config, self.layers = config, layers
        self.calls, self.kept = list[Call](), list[torch.Tensor]()

    def _call(
        self, code: str, out: Value, value: Value | None, other: Value | None = None, /, **fields: Any
    ) -> Value:
        self.calls.append(Call(code, (value, other), out, fields))
        return out

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        """Of a tensor that C reads from end to end; it lives as long as the program."""
        if tensor is None:
            return None
        if not tensor.is_contiguous() or tensor.dtype not in (torch.float32, torch.int32):
            raise UnsupportedError(f"a weight is {tensor.dtype} with strides {tensor.stride()}")
        self.kept.append(tensor)
        return tensor.data_ptr()

    def pick(self, *, x: Value) -> Value:
        return self._call("pick", replace(x, picked=True), x)

    def add_rms_norm(self, *, x: Value | None, residual: Value, weight: torch.Tensor) -> Value:
        out = Value(len(weight), residual.picked)
        return self._call("norm", out, x, residual, weight=self._address(weight), number=self.config.rms_eps)

    def linear(self, *, x: Value, weight: Linear, bias: torch.Tensor | None = None) -> Value:
        if not isinstance(weight, NativeLinear):
            raise UnsupportedError("matrix products are torch's")
        out, k = weight.shape
        return self._call(
            "product", Value(out, x.picked), x, k=k, weight=self._address(weight.weight), bias=self._address(bias),
            isa=weight.kind.isa, choice=int(weight.int8),
        )  # fmt: skip

    def attention(
        self, *, layer: int, qkv: Value, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None
    ) -> Value:
        kind, offset = self.layers[layer]
        norms = {"q_norm": self._address(q_norm), "k_norm": self._address(k_norm)}
        out = Value(self.config.heads * self.config.head_dim)
        return self._call("attention", out, qkv, choice=kind, offset=offset, **norms)

    def gated(self, *, gate_up: Value) -> Value:
        gelu = int(self.config.traits.activation == "gelu_tanh")
        return self._call("gated", Value(self.config.ffn, gate_up.picked), gate_up, choice=gelu)

    def capped(self, *, x: Value, cap: float) -> Value:
        return self._call("capped", x, None, number=cap)


class Program:
    """What `forward` computes of its input, by the operations of program.c."""

    def __init__(self, library: ctypes.CDLL, tracer: Tracer, forward: Forward, width: int) -> None:
        """`width` of the input. Raises UnsupportedError where an operation is asked for that C does not have."""
        given = Value(width)
        result = forward(tracer, given)
        self.library, self.kept, calls = library, tracer.kept, tracer.calls
        places, self.widths = _places(given, result, calls)
        self.result, self.width, self.picked = places[result], result.width, result.picked
        self.ops = (Op * len(calls))()
        for op, call in zip(self.ops, calls, strict=True):
            value, other = (-1 if v is None else places[v] for v in call.inputs)
            fields = {"code": CODES[call.code], "picked": int(call.out.picked), "in": value, "with": other}
            for name, field in {**fields, "out": places[call.out], "n": call.out.width, **call.fields}.items():
                setattr(op, name, field)
        self.per_row = sum(op.n * op.k for op in self.ops)
        self.per_seen = sum(2 * op.n for op in self.ops if op.code == CODES["attention"])
        self.buffers: list[torch.Tensor] = []
        self.pointers = (ctypes.c_void_p * len(self.widths))()
        self.run = Run(ops=ctypes.addressof(self.ops), n_ops=len(calls), buffers=ctypes.addressof(self.pointers))
        self.room = 0
        self._grow(LEAST_ROWS)

    def __call__(self, given: torch.Tensor, picked: torch.Tensor, seen: int = 0, **step: Any) -> torch.Tensor:
        """The result for input rows `given` (which may be overwritten), a view that stands until the next call.
        `picked` int64: the rows that the head reads; `seen`: positions before all tokens; `step`: fields of Run."""
        run, rows = self.run, len(given)
        self._grow(rows)
        self.pointers[0], run.picked = given.data_ptr(), picked.data_ptr()
        run.rows[0], run.rows[1] = rows, len(picked)
        run.work = self.per_row * rows + self.per_seen * seen
        for name, value in step.items():
            setattr(run, name, value)
        self.library.weir_run(ctypes.byref(run))
        rows = run.rows[int(self.picked)]
        result = self.buffers[self.result - 1] if self.result else given.view(-1)
        return result[: rows * self.width].view(rows, self.width)

    def _grow(self, rows: int) -> None:
        if rows <= self.room:
            return
        self.room = 1 << (rows - 1).bit_length()
        self.buffers.clear()
        for i, width in enumerate(self.widths[1:], 1):
            self.buffers.append(torch.empty(self.room * width))
            self.pointers[i] = self.buffers[-1].data_ptr()


def _places(given: Value, result: Value, calls: list[Call]) -> tuple[dict[Value, int], list[int]]:
    """A buffer for each value, such that none is written while what it holds is still wanted; and the width of each buffer.
    Number 0 is the input's, which is the caller's."""
    last = {value: i for i, call in enumerate(calls) for value in (*call.inputs, call.out) if value is not None}
    last[result] = len(calls)
    places, widths, free = {given: 0}, [0], list[int]()
    for i, call in enumerate(calls):
        if call.out not in places:
            fitting = [b for b in free if widths[b] == call.out.width]
            if fitting:
                free.remove(fitting[0])
            else:
                widths.append(call.out.width)
            places[call.out] = fitting[0] if fitting else len(widths) - 1
        free += {places[v] for v in (*call.inputs, call.out) if v is not None and v is not given and last[v] == i}
    return places, widths

