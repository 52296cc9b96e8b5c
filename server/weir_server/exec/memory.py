"""Memory that is read again and again, in huge pages where the kernel has them (docs/decisions/151).

A page of 4 KiB is a translation of an address, which on a virtual machine walks two tables; one of 2 MiB is 512 times as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time

import torch

_SLAB = 64 << 20
_ALIGN = 64
_HUGE = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE, since Linux 6.1; Python has no name for it."""
_REST = 3.0
"""Seconds of rest for each second that moving takes: a quarter of a core at most."""


def anonymous(size: int, huge: bool = True) -> mmap.mmap:
    """`size` bytes of zeros, which cost memory only where they are written; `huge`: in huge pages from the first write on."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        _advise(memory)
    return memory


def _advise(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)


class Arena:
    """Tensors that are kept for good, end to end in mappings of 64 MiB: alone, most matrices would fill no huge page.

    They are written in small pages and moved later: where memory is in pieces a huge page takes the kernel 5 ms to find, which
    for a small model's weights adds up to a second between the start and the first token.
    """

    def __init__(self) -> None:
        self._slabs: list[tuple[mmap.mmap, torch.Tensor]] = []
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int) -> torch.Tensor:
        """`count` float32, beginning at a cache line."""
        size = count * torch.float32.itemsize
        if self._free.numel() < size:
            memory = anonymous(max(size, _SLAB), huge=False)
            self._free = torch.frombuffer(memory, dtype=torch.uint8)
            self._slabs.append((memory, self._free))
        taken, self._free = self._free[:size], self._free[-(-size // _ALIGN) * _ALIGN :]
        return taken.view(torch.float32)

    def move(self) -> None:
        """Into huge pages, at once where the kernel can, else whenever it comes to it; meanwhile all may be read."""
        libc = ctypes.CDLL(None)
        for memory, slab in self._slabs:
            _advise(memory)
            start = slab.data_ptr()
            for page in range(-(-start // _HUGE) * _HUGE, start + len(slab) - _HUGE + 1, _HUGE):
                began = time.monotonic()
                if libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE), _COLLAPSE):
                    break  # what nobody wrote begins, or the kernel is older or finds no room: its own daemon goes on
                time.sleep(_REST * (time.monotonic() - began))
