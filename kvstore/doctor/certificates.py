"""Findings on the configured certificates (readable, matching their key, days until expiry) and on the clock. Pure functions."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from kvstore.doctor.contract import Finding, Level
from kvstore.doctor.facts import ProbeResults, Requirements

SOON_S = 30 * 86_400.0
"""A certificate that expires within this time gets a warning."""
_DAY_S = 86_400


def certificate_findings(facts: ProbeResults, wanted: Requirements, now_s: float) -> Iterator[Finding]:
    """Report the clock and each configured TLS section.

    Args:
        facts: facts of the host.
        wanted: requirements of the configuration; ``tls`` names the files.
        now_s: current time in seconds since 1970.
    """
    yield from _clock(facts, wanted)
    for asked, found in zip(wanted.tls, facts.all("tls"), strict=False):
        area = "TLS"
        if found.error:
            yield Finding(area, Level.WARNING, f"[{asked.section}.tls]: not known: the probe {found.error}")
            continue
        if (closed := found.text("closed")) is not None:
            message = f"[{asked.section}.tls]: {closed} is not open to this user"
            yield Finding(area, Level.WARNING, message, "sudo kvstore doctor")
            continue
        if (broken := found.text("broken")) is not None:
            yield Finding(area, Level.MISSING, f"[{asked.section}.tls]: {broken}", "ls -l /etc/kvstore/tls")
        for one in found.sections("certificates"):
            yield _judge(asked.section, one.text("file") or "?", one.number("ends"), one.text("names"), now_s)


def _clock(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    """Report a clock that follows no time server: certificates, log lines and event times depend on it."""
    synchronized = facts["system"].flag("clock_synchronized")
    if facts["system"].error or synchronized is None:
        return
    if synchronized:
        yield Finding("clock", Level.OK, "synchronized with a time server")
        return
    message = "the kernel does not report a clock that is synchronized with a time server"
    if wanted.tls:
        message += ": a clock that is wrong rejects valid certificates"
    level = Level.WARNING if wanted.tls else Level.INFO
    yield Finding("clock", level, message, "timedatectl   # or: chronyc tracking; enable with: timedatectl set-ntp true")


def _judge(section: str, file: str, ends: int | None, names: str | None, now_s: float) -> Finding:
    if ends is None:
        return Finding("TLS", Level.WARNING, f"[{section}.tls] {file}: its end is not known")
    until = time.strftime("%Y-%m-%d", time.gmtime(ends))
    left = int((ends - now_s) // _DAY_S)
    named = f", for {names}" if names else ""
    look = f"openssl x509 -noout -dates -in {shlex.quote(file)}"
    if ends <= now_s:
        return Finding("TLS", Level.MISSING, f"[{section}.tls] {file}: expired on {until}: nobody accepts it", look)
    if ends - now_s < SOON_S:
        return Finding("TLS", Level.WARNING, f"[{section}.tls] {file}: expires in {left} days, on {until}{named}", look)
    return Finding("TLS", Level.OK, f"[{section}.tls] {file}: valid until {until}, {left} days{named}")
