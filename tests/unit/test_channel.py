"""Frames over a real socketpair: both ends, whole and in pieces, and the death of either side."""

from __future__ import annotations

import socket

import pytest

from weir_server.cli.child import run_over
from weir_server.contract import Knobs
from weir_server.link.channel import MAX_FRAME, AsyncChannel, Channel, ChannelClosed, frame
from weir_server.link.messages import Admitted, Boot, Cancel, Fatal, Finished, Quit, Report, Sampling, Stats, Submit, Tokens

KNOBS = Knobs(4, 1 << 30, 0.01, 32)
SUBMIT = Submit(7, list(range(3000)), Sampling(max_tokens=5, logit_bias={3: -1.5}), 12.5, n=2)


def pair() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def test_messages_arrive_in_order_however_the_bytes_are_cut():
    wire = frame(Boot(model="/m.gguf", threads=2)) + frame(SUBMIT) + frame(Cancel(7))
    for size in (1, 3, 4, 5, 1000, len(wire)):
        channel, peer = pair()
        got = []
        for i in range(0, len(wire), size):
            peer.sendall(wire[i : i + size])
            got += channel.recv(0)
        while len(got) < 3:
            got += channel.recv(5)
        assert got == [Boot(model="/m.gguf", threads=2), SUBMIT, Cancel(7)]
        assert channel.recv(0) == []


def test_what_was_sent_before_the_end_is_read_before_the_end_is_told():
    channel, peer = pair()
    peer.sendall(frame(Cancel(1)))
    peer.close()
    assert channel.recv(None) == [Cancel(1)]
    with pytest.raises(ChannelClosed):
        channel.recv(None)


@pytest.mark.parametrize("together", [True, False])
def test_a_parent_that_gives_up_at_once_is_heard_before_the_model_is_loaded(together: bool):
    ours, theirs = socket.socketpair()
    boot, end = frame(Boot(model="/nowhere.gguf", threads=1)), frame(Quit())
    theirs.sendall(boot + end if together else boot)
    if not together:
        theirs.sendall(end)
    assert run_over(Channel(ours)) == 0
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):  # not a word about the model
        theirs.recv(1)


def test_a_parent_that_goes_without_reading_everything_is_gone_all_the_same():
    """The socket reads as reset then, not as at its end."""
    channel, peer = pair()
    channel.send(Fatal("never read"))
    peer.close()
    with pytest.raises(ChannelClosed):
        channel.recv(None)


def test_sending_to_a_dead_parent_raises():
    channel, peer = pair()
    peer.close()
    with pytest.raises(ChannelClosed):
        channel.send(Fatal("x"))


def test_a_length_out_of_all_reason_is_no_frame():
    channel, peer = pair()
    peer.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
    with pytest.raises(ChannelClosed):
        channel.recv(5)


NONSENSE = [b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x07", frame({"type": "Wizard"})]


@pytest.mark.parametrize("wire", NONSENSE, ids=["no msgpack", "no message", "an unknown message"])
async def test_a_frame_that_is_no_message_closes_the_channel_on_either_side(wire: bytes):
    channel, peer = pair()
    peer.sendall(wire)
    with pytest.raises(ChannelClosed, match="no message"):
        channel.recv(5)
    ours, theirs = socket.socketpair()
    parent = await AsyncChannel.open(ours)
    theirs.sendall(wire)
    with pytest.raises(ChannelClosed, match="no message"):
        await anext(aiter(parent))
    parent.close()


async def test_the_parents_side_reads_what_the_child_sends():
    ours, theirs = socket.socketpair()
    child = Channel(theirs)
    parent = await AsyncChannel.open(ours)
    events = [Admitted(7, 0, 1.0, 16), Tokens(7, 0, 1.1, [5, 6]), Finished(7, 0, 1.2, "stop", 2)]
    report = Report(1.0, events, KNOBS, Stats(running=1))
    child.send(report)
    child.send(Fatal("gone", user_error=True))
    parent.send(SUBMIT)
    messages = aiter(parent)
    assert await anext(messages) == report
    assert await anext(messages) == Fatal("gone", user_error=True)
    assert child.recv(5) == [SUBMIT]
    theirs.close()
    assert [m async for m in messages] == []
    parent.close()
