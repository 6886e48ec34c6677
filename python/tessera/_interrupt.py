# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C during a long call.

Python handles signals between two bytecodes of the main thread, and a call into the library is one.
So a long call of the main thread runs on a thread of its own while the main thread waits where a
signal's handler can run; what the handler raises tells the library to stop, through
tessera_buffers.interrupt, and is raised once it has."""

from __future__ import annotations

import ctypes
import threading

from . import _lib

# Multiplications of a call that is worth a thread, 50 us of some 20 ms on one core.
LONG = 1_000_000_000

_main = threading.main_thread()


def is_long(problem) -> bool:
    """True if the extents of a tessera_problem allow that much work."""
    q, k, v, pages = (problem.tensor[_lib.INDEX[name]] for name in ("q", "k", "v", "page_table_k"))
    pairs = q.extent[0] * q.extent[1] * q.extent[2] * k.extent[1]
    if pages.dtype:  # k has the extents of a page
        pairs *= pages.extent[1]
    return pairs * (q.extent[3] + v.extent[3]) >= LONG


def run(function, words, place: int) -> int:
    """function(), which reads its buffers from `words`, with words[place] for the address of a flag."""
    if threading.current_thread() is not _main:
        return function()
    stop = ctypes.c_int32(0)
    words[place] = ctypes.addressof(stop)
    code = []
    mine, done = threading.Lock(), threading.Lock()  # mine: of whoever is to make or to drop the call
    done.acquire()

    def work():
        if not mine.acquire(blocking=False):
            return
        try:
            code.append(function())
        finally:
            done.release()

    try:
        threading.Thread(target=work, name="tessera-call", daemon=True).start()
        raised = None
    except BaseException as error:  # no thread, or a signal's handler while one starts
        if mine.acquire(blocking=False):
            raise
        stop.value = 1
        raised = error
    while True:
        try:
            done.acquire()
            break
        except BaseException as error:  # of a signal's handler; the arrays are in use until the end
            stop.value = 1
            raised = raised or error
    if raised is not None:
        raise raised
    return code[0]
