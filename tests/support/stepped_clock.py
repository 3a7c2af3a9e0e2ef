"""Wall clocks of single processes that tests step, by a library that is loaded before libc. It needs a C compiler.

Programs read the wall clock by ``clock_gettime``, ``gettimeofday`` or ``time``. The library adds an offset that it reads from a
file which it has mapped. Other clocks stay as they are, as on a host whose time of day is set.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long offset_s(void) {
    static volatile long *mapped;
    if (!mapped) {
        const char *path = getenv("STEPPED_CLOCK");
        int fd = path ? open(path, O_RDONLY) : -1;
        void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
        static long none;
        mapped = found == MAP_FAILED ? &none : found;
    }
    return *mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int code = next(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    int code = clock_gettime(CLOCK_REALTIME, &found);
    if (!code) now->tv_sec = found.tv_sec, now->tv_usec = found.tv_nsec / 1000;
    return code;
}

time_t time(time_t *into) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (into) *into = found.tv_sec;
    return found.tv_sec;
}
"""


def build(folder: Path) -> Path | None:
    """Build the library. None: there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "stepped_clock.c", folder / "stepped_clock.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


class SteppedClock:
    """The wall clock of the processes that are started with ``environment``."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.step(0)
        self.environment = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(file)}

    def step(self, offset_s: int) -> None:
        """Set the difference to the host's clock."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        descriptor = os.open(self._file, os.O_WRONLY)
        os.pwrite(descriptor, struct.pack("l", offset_s), 0)
        os.close(descriptor)
