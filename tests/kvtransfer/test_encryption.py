"""Pages and control frames in AES-GCM over TCP: what arrives, and what somebody on the way can do."""

from __future__ import annotations

import socket
from contextlib import closing

import numpy as np
import pytest

from common.errors import TransferError
from common.host import host_identity
from kvtransfer import encryption
from kvtransfer.encryption import TAG_BYTES, FrameCipher, derive_ciphers
from kvtransfer.frames import Challenge, bound, receive_frame
from kvtransfer.pages import PageWrite
from kvtransfer.select import open_sender
from kvtransfer.transport import Bounds
from tests.kvtransfer.peers import pool, receiving
from tests.kvtransfer.relay import Relay
from wire.messages.transfer import TransferEndpoint

QUICK = Bounds(connect_s=2.0, silence_s=2.0, write_s=20.0)
WRITE = PageWrite(1, 0, "full", np.array([3, 1, 2]), np.array([1, 2, 5]))
PAGES = {"full": np.array([1, 2, 5])}


def frame_of(cipher: FrameCipher, plain: bytes) -> memoryview:
    frame = memoryview(bytearray(len(plain) + TAG_BYTES))
    cipher.encrypt(plain, frame)
    return frame


def plain_of(cipher: FrameCipher, frame: memoryview) -> bytes:
    plain = bytearray(len(frame) - TAG_BYTES)
    cipher.decrypt(frame, memoryview(plain))
    return bytes(plain)


def test_frames_decrypt_in_order() -> None:
    ours, theirs = FrameCipher(bytes(32)), FrameCipher(bytes(32))
    frames = [frame_of(ours, b"same") for _ in range(3)]
    assert len({bytes(frame) for frame in frames}) == 3, "equal frames do not look equal"
    assert [plain_of(theirs, frame) for frame in frames] == [b"same"] * 3


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 1, 0]])
def test_a_frame_at_another_place_does_not_decrypt(order: list[int]) -> None:
    ours, theirs = FrameCipher(bytes(32)), FrameCipher(bytes(32))
    frames = [frame_of(ours, b"same") for _ in range(3)]
    for index in order[:-1]:
        plain_of(theirs, frames[index])
    with pytest.raises(TransferError, match="not what the peer sent"):
        plain_of(theirs, frames[order[-1]])


def test_a_changed_head_does_not_decrypt() -> None:
    frame = memoryview(bytearray(4 + TAG_BYTES))
    FrameCipher(bytes(32)).encrypt(b"text", frame, b"head")
    with pytest.raises(TransferError):
        FrameCipher(bytes(32)).decrypt(frame, memoryview(bytearray(4)), b"tail")


def test_keys_change_after_a_bounded_number_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "_FRAMES_PER_KEY", 2)
    ours, theirs = FrameCipher(bytes(32)), FrameCipher(bytes(32))
    frames = [frame_of(ours, b"same") for _ in range(5)]
    assert len({bytes(frame) for frame in frames}) == 5, "no key and number comes twice"
    assert [plain_of(theirs, frame) for frame in frames] == [b"same"] * 5


def test_every_connection_and_direction_has_its_own_key() -> None:
    pairs = [derive_ciphers("t", b"r" * 16, b"s" * 16), derive_ciphers("u", b"r" * 16, b"s" * 16)]
    pairs += [derive_ciphers("t", b"x" * 16, b"s" * 16), derive_ciphers("t", b"r" * 16, b"x" * 16)]
    assert len({bytes(frame_of(cipher, b"same")) for pair in pairs for cipher in pair}) == 8


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("page_bytes", [64, 4096, 300_000, 1_835_008])
def test_pages_arrive(page_bytes: int, staged: bool) -> None:
    with receiving("tcp", 8, page_bytes, QUICK, staged, encrypted=True) as (receiver, data):
        source = pool(8, page_bytes, 1, staged)
        with closing(open_sender({"full": source}, host_identity(), "tcp", bounds=QUICK)) as sender:
            for epoch in range(2):  # the second time over the same connection
                receiver.open(1, epoch, PAGES)
                write = PageWrite(1, epoch, "full", WRITE.src_pages, WRITE.dst_pages)
                assert sender.write(receiver.endpoints[0], write) == 3 * page_bytes
                assert (data[WRITE.dst_pages] == source.tensor[WRITE.src_pages]).all()
                assert not receiver.landed(1, epoch).missing
                assert receiver.close_room(1, epoch).passed


def test_nothing_on_the_way_can_be_read() -> None:
    with receiving("tcp", 8, 4096, QUICK, encrypted=True) as (receiver, _):
        receiver.open(1, 0, PAGES)
        source = pool(8, 4096, 1)
        with closing(Relay(receiver.endpoints[0])) as relay:
            with closing(open_sender({"full": source}, host_identity(), "tcp", bounds=QUICK)) as sender:
                sender.write(relay.endpoint, WRITE)
            (said,) = relay.said
        assert len(said) > 3 * 4096
        assert source.tensor[1].numpy().tobytes()[8:200] not in said
        assert b"full" not in said, "nor a control frame"
        assert receiver.endpoints[0].params["token"].encode() not in said


@pytest.mark.parametrize("at", [2, 30, 150, 400, 5_000, 9_000, -17, -3])
def test_a_changed_byte_ends_the_connection_and_nothing_lands(at: int) -> None:
    """Wherever it is: in a length, the Hello, the Begin, a page, the End or its tag."""
    at = at if at >= 0 else _said_of_a_write() + at

    def change(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        changed = bytearray(data)
        changed[at - before] ^= 1
        return bytes(changed)

    with receiving("tcp", 8, 4096, QUICK, encrypted=True) as (receiver, _):
        receiver.open(1, 0, PAGES)
        source = {"full": pool(8, 4096, 1)}
        with (
            closing(Relay(receiver.endpoints[0], change)) as relay,
            closing(open_sender(source, host_identity(), "tcp", bounds=QUICK)) as sender,
        ):
            with pytest.raises(TransferError):
                sender.write(relay.endpoint, WRITE)
            assert receiver.landed(1, 0).missing == {"full": 3}
            assert sender.write(receiver.endpoints[0], WRITE) == 3 * 4096, "the room goes on"


def _said_of_a_write() -> int:
    """The bytes of a sender that writes once."""
    with receiving("tcp", 8, 4096, QUICK, encrypted=True) as (receiver, _):
        receiver.open(1, 0, PAGES)
        with closing(Relay(receiver.endpoints[0])) as relay:
            source = {"full": pool(8, 4096, 1)}
            with closing(open_sender(source, host_identity(), "tcp", bounds=QUICK)) as sender:
                sender.write(relay.endpoint, WRITE)
            return len(relay.said[0])


def test_a_recorded_connection_is_worth_nothing() -> None:
    with receiving("tcp", 8, 4096, QUICK, encrypted=True) as (receiver, data):
        receiver.open(1, 0, PAGES)
        with closing(Relay(receiver.endpoints[0])) as relay:
            source = {"full": pool(8, 4096, 1)}
            with closing(open_sender(source, host_identity(), "tcp", bounds=QUICK)) as sender:
                sender.write(relay.endpoint, WRITE)
            (said,) = relay.said
        receiver.close_room(1, 0)
        receiver.open(1, 1, PAGES)
        data.zero_()
        host, _, port = receiver.endpoints[0].address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            bound(sock, 10.0)
            assert isinstance(receive_frame(sock), Challenge)
            sock.sendall(said)
            with pytest.raises(TransferError, match="closed"):
                receive_frame(sock)
        assert int(data.count_nonzero()) == 0
        assert receiver.landed(1, 1).missing == {"full": 3}


def test_who_leaves_the_cipher_out_gets_nothing() -> None:
    with receiving("tcp", 8, 64, QUICK, encrypted=True) as (receiver, data):
        receiver.open(1, 0, PAGES)
        true = receiver.endpoints[0]
        assert true.params["cipher"] == "aes-256-gcm"
        for cipher in ({}, {"cipher": "rot13"}):
            endpoint = TransferEndpoint(true.backend, true.address, {"token": true.params["token"], **cipher})
            source = {"full": pool(8, 64, 1)}
            with (
                closing(open_sender(source, host_identity(), "tcp", bounds=QUICK)) as sender,
                pytest.raises(TransferError),
            ):
                sender.write(endpoint, WRITE)
        assert int(data.count_nonzero()) == 0


@pytest.mark.parametrize("page_bytes", [4096, 300_000])
def test_mooncakes_control_frames_are_encrypted_too(page_bytes: int) -> None:
    with receiving("mooncake", 8, page_bytes, QUICK, encrypted=True) as (receiver, data):
        receiver.open(1, 0, PAGES)
        source = pool(8, page_bytes, 1)
        with closing(Relay(receiver.endpoints[0])) as relay:
            with closing(open_sender({"full": source}, host_identity(), "mooncake", bounds=QUICK)) as sender:
                assert sender.write(relay.endpoint, WRITE) == 3 * page_bytes
            (said,) = relay.said
        assert (data[WRITE.dst_pages] == source.tensor[WRITE.src_pages]).all()
        assert b"full" not in said
