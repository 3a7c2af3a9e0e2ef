"""The speed of the link that carries an address."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.transport.link_speed import is_hardware, link_speed


@pytest.mark.parametrize(
    ("host", "advertised"),
    [
        ("127.0.0.1", None),
        ("::1", None),
        ("0.0.0.0", "127.0.0.1"),  # as a node is configured, nothing listens
        ("0.0.0.0", None),
        ("192.0.2.1", None),
        ("0.0.0.0", "no.such.name.invalid"),
        ("", None),
    ],
)
def test_link_speed_without_hardware_is_unknown(host: str, advertised: str | None) -> None:
    assert link_speed(host, advertised) is None


def test_is_hardware_tells_nics_from_virtual_devices(tmp_path: Path) -> None:
    for name, uevent in (("eth0", ""), ("bond0", "DEVTYPE=bond\n"), ("veth1", "INTERFACE=veth1\n"), ("br0", "DEVTYPE=bridge\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "uevent").write_text(uevent)
    (tmp_path / "eth0" / "device").mkdir()
    found = {name: is_hardware(name, tmp_path) for name in ("eth0", "bond0", "veth1", "br0", "none")}
    assert found == {"eth0": True, "bond0": True, "veth1": False, "br0": False, "none": False}
