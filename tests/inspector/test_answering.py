import threading

from nnx_inspector.inspector.commands import Answering
from nnx_inspector.screen import protocol


def test_each_request_is_answered_before_its_reply_in_another_thread():
    said, threads = [], set()

    def answer(request):
        threads.add(threading.current_thread())
        if request.site == "bad":
            raise KeyError("'bad' is not there.")
        return (request.site, None) if request.site != "gone" else None

    answering = Answering(
        answer, lambda *sent: said.append(sent), lambda *reply: said.append(reply)
    )
    for number, site in enumerate(("a", "bad", "gone", "b")):
        answering.ask(protocol.Look(id=number, what="code", site=site))
    answering.wait()
    assert said == [
        ("a", None), (0, ""), (1, "'bad' is not there."), (2, ""), ("b", None), (3, ""),
    ]  # fmt: skip
    assert threading.current_thread() not in threads
    answering.close()
    answering.ask(protocol.Look(id=9, what="code", site="a"))
    assert said[-1] == (9, "This inspector was closed.")
