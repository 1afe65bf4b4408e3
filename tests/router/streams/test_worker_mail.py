"""WorkerMail: what is gathered over ticks."""

from __future__ import annotations

from router.streams.worker_mail import WorkerMail
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Ack


def test_an_acknowledgement_never_goes_back() -> None:
    sent: list[tuple[str, AnyMessage]] = []
    mail = WorkerMail(lambda to, message: sent.append((to, message)), 1.0)
    for upto in (5, 3):
        mail.acknowledge("tcp://d", 1, 0, upto)
    mail.acknowledge("tcp://d", 1, 1, 2)
    mail.tick(0.0)
    assert sent == [("tcp://d", Ack([(1, 0, 5), (1, 1, 2)]))]


def test_acknowledgements_of_several_ticks_go_together() -> None:
    sent: list[AnyMessage] = []
    mail = WorkerMail(lambda _to, message: sent.append(message), 1.0)
    for upto in range(1, 7):
        mail.acknowledge("tcp://d", 1, 0, upto)
        mail.tick(upto * 0.0625)
    assert sent == [Ack([(1, 0, 1)]), Ack([(1, 0, 5)])]
