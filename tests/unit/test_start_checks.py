"""What is looked at before a server starts: its ports, its API keys, and the marker that an unclean exit has left."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from weir_server.cli.bootfile import read_boot_file
from weir_server.cli.keys import read_keys
from weir_server.http.bind import bind, listen
from weir_server.http.marker import BACK_OFF, Marker
from weir_server.link.errors import UserError


@pytest.mark.parametrize("host", [None, "localhost", "127.0.0.1"])
def test_of_two_servers_that_start_on_one_port_the_second_is_told_before_it_loads(host: str | None):
    first = bind(host, 0)
    port = first[0].getsockname()[1]
    with pytest.raises(UserError, match=f"Port {port} is in use"):
        bind(host, port)
    for sock in first:
        listen(sock, 8)
    with pytest.raises(UserError, match=f"Port {port} is in use"):
        bind(host, port)
    for sock in first:
        sock.close()


def test_a_port_whose_last_connections_linger_is_free_for_the_next_server():
    (sock,) = bind("127.0.0.1", 0)
    listen(sock, 8)
    address = sock.getsockname()
    client = socket.create_connection(address)
    served, _ = sock.accept()
    served.close()  # this side first: it is the one that lingers
    client.close()
    sock.close()
    (again,) = bind("127.0.0.1", address[1])
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind(address)
    listen(again, 8)
    again.close()


def test_whoever_listens_second_is_told_where_both_could_bind():
    """Both bound while connections of a third one lingered."""
    socks = []
    for _ in range(2):
        socks.append(socket.socket())
        socks[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socks[-1].bind(("127.0.0.1", socks[0].getsockname()[1] if len(socks) > 1 else 0))
    listen(socks[0], 8)
    with pytest.raises(UserError, match="is in use"):
        listen(socks[1], 8)
    for sock in socks:
        sock.close()


def test_a_drain_of_the_boot_file_that_no_timer_could_wait_for(tmp_path: Path):
    (file := tmp_path / "boot.yaml").write_text("drain_timeout: 1.0e+300\n")
    with pytest.raises(UserError, match=r"drain_timeout: 1e.300; it must be a number from 0 to 1000000000"):
        read_boot_file(str(file))


def test_keys_from_the_flag_and_from_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\nbob: beta \n")
    for key, keys in (("gamma\n", (b"gamma", b"alpha", b"beta")), (None, (b"alpha", b"beta"))):
        found = read_keys(key, str(file))
        assert found is not None and found() == keys
    assert read_keys(None, None) is None


def test_keys_rotate_and_a_file_that_cannot_be_used_lets_nobody_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "keys"
    file.write_text("alpha\n")
    found = read_keys("own", str(file))
    assert found is not None
    both = (b"alpha", b"bravo")
    for content, keys in (("bravo\n", both[1:]), ("", ()), ("a:\n", ()), ("\n", ()), ("alpha\nbravo\n", both)):
        file.write_text(content)  # in place, of the same length, within one tick of the clock: all of it counts
        assert found() == found() == (b"own", *keys)
    file.unlink()
    assert found() == found() == (b"own",)
    file.write_bytes(b"\xff")
    assert found() == (b"own",)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 5, "each once"


@pytest.mark.parametrize(("key", "lines", "words"), [
    ("", None, "--api-key"), ("  ", None, "--api-key"), (None, "alpha\nbob:\n", "line 2"), (None, "bob:  ", "line 1"),
    ("x", "", "holds no API key"), (None, "# none\n", "holds no API key"),
])  # fmt: skip
def test_an_empty_key_never_opens_the_door(tmp_path: Path, key: str | None, lines: str | None, words: str):
    file = tmp_path / "keys"
    if lines is not None:
        file.write_text(lines)
    with pytest.raises(UserError, match=words):
        read_keys(key, None if lines is None else str(file))


def test_an_empty_name_of_a_key_file_is_no_leave_to_do_without():
    with pytest.raises(UserError, match="Cannot read the API keys"):
        read_keys(None, "")


def test_each_unclean_exit_takes_the_budget_down_once_more(tmp_path: Path):
    Marker(str(tmp_path)).note(1000)
    again = Marker(str(tmp_path))
    assert again.start_budget() == int(1000 * BACK_OFF)
    again.note(850)
    assert Marker(str(tmp_path)).start_budget() == int(850 * BACK_OFF)
    Marker(str(tmp_path)).remove()
    assert Marker(str(tmp_path)).start_budget() is None


def test_a_marker_that_cannot_be_removed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "running.json").mkdir()
    Marker(str(tmp_path)).remove()
    assert "cannot remove" in caplog.text
