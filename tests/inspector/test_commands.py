"""Requests of the browser, with a stand-in for the inspector: its calls, and one reply each."""

import contextlib
import dataclasses
import itertools
import threading
import types

import pytest
from inside import receive

import nnx_inspector as nni
from nnx_inspector.inspector.commands import Commands
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import InspectorWidget, Screen, asset
from nnx_inspector.screen.presenter import Presenter


@dataclasses.dataclass
class Handle:
    """As `handles.Handle`, of any kind."""

    id: int
    site: str
    perturbation: object
    enabled: bool = True
    compiling: bool = False
    removed: bool = False

    @property
    def sites(self):
        return (self.site,)

    @property
    def strength(self):
        return self.perturbation.tuned_to

    def remove(self):
        self.removed = True


class Fake:
    """The handles, and the other methods that a command may call."""

    def __init__(self):
        self.made: list[Handle] = []
        self.asked: list[object] = []

    def perturb(self, only, perturbation):
        if only == "nowhere":
            raise ValueError("'nowhere' matches no site.")
        self.made.append(Handle(len(self.made) + 1, only, perturbation))
        return self.made[-1]

    def switch_all(self, enabled):
        for handle in self.all():
            handle.enabled = enabled

    def change(self, handle, *, enabled, perturbation):
        handle.enabled = enabled
        if perturbation is not None:
            handle.perturbation = perturbation

    def request(self, only, perturbation):
        return only, perturbation.python(short=True)

    def queue(self, sweep):
        self.asked.append(sweep)

    def stop(self):
        self.asked.append("stop")

    def forget(self):
        """Nothing is remembered."""

    @property
    def cache(self):
        return types.SimpleNamespace(clear=self.forget)

    def all(self):
        return [handle for handle in self.made if not handle.removed]

    def get(self, number):
        for handle in self.all():
            if handle.id == number:
                return handle
        raise KeyError(f"There is no perturbation with the number {number}; it was removed.")


class Replies:
    """The part of the screen that commands use."""

    def __init__(self):
        self.said: list[tuple[int, str]] = []
        self.python = ""
        self.states: list[str] = []
        self.screen = types.SimpleNamespace(reply=self.reply)

    def state_changed(self):
        self.states.append(self.python)

    def reply(self, number, error=""):
        self.said.append((number, error))


def commands(fake, view):
    core = types.SimpleNamespace(handles=fake, view=view, closing=contextlib.ExitStack())
    core.trace, core.require_site, core.array_reader = (
        Trace((), (), (), (), {}),
        lambda site: site,
        fake,
    )
    parts = dict.fromkeys(("targets", "sweeps", "studies", "pages", "rerun"), fake)
    return Commands(core, **parts)


@pytest.fixture
def fake():
    return Fake()


def ask(fake, message):
    """The error of the single reply, "" if it has none."""
    view = Replies()
    commands(fake, view).answer(message)
    ((number, error),) = view.said
    assert number == message.id
    return error


def shown(message):
    """The messages that a command sends over the stream, and the error of its later reply."""
    said = []
    screen = types.SimpleNamespace(
        send=lambda m, buffer=None: said.append((m, buffer)),
        reply=lambda number, error="": said.append((number, error)),
    )
    row = protocol.Site(
        key="", name="M", kind="M", parent=-1, depth=0, inputs="", output="", parameters=0,
        flops=None, calls=0, stacked=0, aliases=(), source="", perturbable=False, unseen="",
    )  # fmt: skip
    layout = protocol.Layout(version=protocol.VERSION, layout=4, model="M", sites=(row,))
    commands(Fake(), types.SimpleNamespace(screen=screen, layout=layout)).answer(message)
    *sent, (number, error) = said
    assert number == message.id
    return sent, error


def test_a_flow_comes_before_its_reply():
    ((flow, buffer),), error = shown(protocol.ShowFlow(id=6, site=""))
    assert (flow.site, flow.id, flow.layout, flow.nodes, buffer, error) == ("", 6, 4, (), None, "")
    assert shown(protocol.ShowFlow(id=7, site="x")) == (
        [], "There is no site 'x' in this model."
    )  # fmt: skip


def test_the_layout_library_comes_as_bytes():
    ((message, buffer),), error = shown(protocol.GetLayoutLibrary(id=8))
    assert (message, error) == (protocol.LayoutLibrary(version=protocol.VERSION), "")
    assert buffer == asset("layout.js").encode()
    assert b"export" in buffer


def perturb(kind, strength=None, at="output", site="a"):
    return protocol.Perturb(id=3, site=site, kind=kind, strength=strength, at=at)


def adjust(number, *, enabled=True, strength=None):
    return protocol.Adjust(id=4, perturbation=number, enabled=enabled, strength=strength)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (perturb("Zero"), "nni.Zero()"),
        (perturb("Scale"), "nni.Scale(factor=0.5)"),
        (perturb("Scale", 0.0), "nni.Scale(factor=0.0)"),
        (perturb("Shift", -1.5, "input"), "nni.Shift(offset=1.0, strength=-1.5, at='input')"),
        (perturb("Noise"), "nni.Noise(std=0.1)"),
        (perturb("Clamp", 2.0), "nni.Clamp(low=-2.0, high=2.0)"),
        (perturb("Cast"), "nni.Cast(dtype=bfloat16)"),
        (perturb("Mean", at="input"), "nni.Mean(at='input')"),
        (perturb("StopGradient"), "nni.StopGradient()"),
        (perturb("ClipGradient", 0.5), "nni.ClipGradient(norm=0.5)"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_click_adds_what_it_says(fake, message, text):
    assert ask(fake, message) == ""
    assert [(h.site, h.perturbation.python(short=True)) for h in fake.made] == [("a", text)]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (perturb("Melt"), "There is no perturbation 'Melt' on the menu. It has Zero"),
        (perturb("Zero", 0.5), "Zero has no strength to set."),
        (perturb("Noise", -1.0), "Noise takes a number of at least 0.0, got -1.0."),
        (perturb("Zero", site="nowhere"), "'nowhere' matches no site."),
        (adjust(7), "There is no perturbation with the number 7; it was removed."),
        (protocol.Remove(id=5, perturbation=7), "There is no perturbation with the number 7"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_done_is_the_reply(fake, message, text):
    assert ask(fake, message).startswith(text)
    assert fake.made == []


def test_a_strength_that_cannot_be_changes_nothing(fake):
    ask(fake, perturb("Clamp", 2.0))
    ask(fake, perturb("Zero"))
    assert "at least 0.0" in ask(fake, adjust(1, enabled=False, strength=-1.0))
    assert "no strength that is one number" in ask(fake, adjust(2, enabled=False, strength=1.0))
    assert [(h.perturbation.python(short=True), h.enabled) for h in fake.made] == [
        ("nni.Clamp(low=-2.0, high=2.0)", True),
        ("nni.Zero()", True),
    ]


def test_adjusting_sets_strength_and_switch(fake):
    ask(fake, perturb("Shift", 1.0, "input"))
    assert ask(fake, adjust(1, enabled=False, strength=-0.25)) == ""
    (handle,) = fake.made
    assert (
        handle.perturbation.python(short=True)
        == "nni.Shift(offset=1.0, strength=-0.25, at='input')"
    )
    assert not handle.enabled
    before = handle.perturbation
    assert ask(fake, adjust(1)) == ""
    assert handle.enabled
    assert handle.perturbation is before


def test_all_are_switched(fake):
    for kind in ("Zero", "Mean", "StopGradient"):
        ask(fake, perturb(kind))
    ask(fake, protocol.Remove(id=1, perturbation=2))
    for enabled in (False, True):
        assert ask(fake, protocol.SwitchAll(id=8, enabled=enabled)) == ""
        assert [h.enabled for h in fake.all()] == [enabled, enabled]
    assert fake.made[1].enabled, "a removed one is not touched"


def set_mask(number, bits, *, units=10, site="a", columns=0):
    return protocol.SetMask(
        id=6, perturbation=number, site=site, units=units, mask=bits, columns=columns
    )


def test_a_mask_is_added_and_set_bit_by_bit(fake):
    assert ask(fake, set_mask(None, "bf80")) == ""
    assert fake.made[0].perturbation.mask.tolist() == [True, False, *[True] * 7, False]
    assert ask(fake, set_mask(1, "ffc0")) == ""
    assert fake.made[0].perturbation.mask.all()
    assert len(fake.made) == 1


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (set_mask(None, "bf"), "10 units need 2 bytes of bits, got 1."),
        (set_mask(None, "zz", units=8), "non-hexadecimal number"),
        (set_mask(None, "ff", units=8, columns=3), "cannot reshape array"),
        (set_mask(None, "", units=0), "A mask has 1 to 16384 units here, got 0."),
        (set_mask(3, "bf80"), "There is no perturbation with the number 3"),
    ],
    ids=["bytes", "hexadecimal", "rows", "none", "handle"],
)
def test_a_mask_that_is_none_is_the_reply(fake, message, text):
    assert ask(fake, message).startswith(text)
    assert fake.made == []


def test_a_sweep_is_started_and_stopped(fake):
    start = protocol.StartSweep(id=8, sites="a/**", kind="Scale", strength=0.5, at="output")
    assert ask(fake, start) == ""
    assert ask(fake, protocol.StopSweep(id=9)) == ""
    assert fake.asked == [("a/**", "nni.Scale(factor=0.5)"), "stop"]


def test_what_may_take_long_is_answered_in_order_before_its_reply_in_a_thread(fake, monkeypatch):
    said, threads = [], set()

    def look(core, request):
        threads.add(threading.current_thread())
        if request.site == "bad":
            raise KeyError("'bad' is not there.")
        return (request.site, None)

    monkeypatch.setattr("nnx_inspector.inspector.commands.answer_look", look)
    view = Replies()
    view.screen = types.SimpleNamespace(
        send=lambda *sent: said.append(sent),
        reply=lambda number, error="": said.append((number, error)),
    )
    view.compared = lambda request: None
    one = commands(fake, view)
    for number, site in enumerate(("a", "bad", "b")):
        one.answer(protocol.Look(id=number, what="code", site=site))
    one.answer(protocol.Compare(id=3, number=1, pinned=2))
    one.wait()
    assert said == [
        ("a", None), (0, ""), (1, "'bad' is not there."), ("b", None), (2, ""), (3, ""),
    ]  # fmt: skip
    assert threading.current_thread() not in threads
    assert view.python == "", "a panel looks by itself: nothing was clicked"
    one._core.closing.close()  # what a core would close with itself
    one.answer(protocol.Look(id=9, what="code", site="a"))
    assert said[-1] == (9, "This inspector was closed.")


def test_a_look_does_not_wait_for_values_that_are_being_compiled(fake, monkeypatch):
    compiled, replies = threading.Event(), {1: threading.Event(), 2: threading.Event()}
    module = "nnx_inspector.inspector.commands"
    monkeypatch.setattr(f"{module}.read_values", lambda *_: compiled.wait(60) and None)
    monkeypatch.setattr(f"{module}.answer_look", lambda core, request: None)
    view = Replies()
    view.screen = types.SimpleNamespace(reply=lambda number, error="": replies[number].set())
    one = commands(fake, view)
    one.answer(protocol.ShowValues(id=1, site="a", part="output", clean=False))
    one.answer(protocol.Look(id=2, what="units", site="a"))
    assert replies[2].wait(60)
    assert not replies[1].is_set()
    compiled.set()
    assert replies[1].wait(60)


def test_every_request_has_its_handler():
    without_reply = {protocol.Hello, protocol.Ack}
    of_runs = {protocol.SetEvery, protocol.MeasureNext, protocol.ReadSite}
    of_all = {protocol.OpenBeside}  # answered by `RequestHandler`
    assert set(Commands.table) == set(protocol.TO_KERNEL) - without_reply - of_runs - of_all


def test_what_was_clicked_last_is_told_in_python_and_what_failed_is_not_sent(fake):
    view = Replies()
    one = commands(fake, view)
    one.answer(perturb("Scale", 0.5))
    one.answer(protocol.SwitchAll(id=1, enabled=False))
    one.answer(protocol.StopSweep(id=2))
    one.answer(perturb("Zero", site="nowhere"))
    assert view.states == ['insp.perturb("a", nni.Scale(factor=0.5))', "insp.switch_all(False)"]
    assert view.python == "insp.switch_all(False)"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"at": "parameter"}, "perturb.at must be 'output' or 'input', got 'parameter'"),
        ({"at": None}, "perturb.at must be 'output' or 'input', got None"),
        ({"at": ["output"]}, r"perturb.at must be 'output' or 'input', got \['output'\]"),
        ({"strength": "1"}, "perturb.strength must be float, got str"),
        ({"strength": 10**400}, "perturb.strength must be finite"),
        ({"strength": -(10**5000)}, "perturb.strength must be finite"),
        ({"id": 2**53 + 1}, r"perturb.id must lie within 2\*\*53 of 0"),
        ({"at": 10**5000}, "perturb.at must be 'output' or 'input', got a very long int"),
        ({"type": 10**5000}, "Unknown message type a very long int"),
        ({"site": "0" * 10**6}, "perturb.site has 1000000 characters, more than 65536"),
    ],
)
def test_a_command_that_does_not_fit_is_refused(header, text):
    with pytest.raises(protocol.ProtocolError, match=text):
        protocol.from_header(protocol.to_header(perturb("Zero")) | header)


@pytest.mark.parametrize("strength", [3, -(2**53), 10**20, 1e300])
def test_a_number_that_javascript_has_is_taken(strength):
    message = protocol.from_header(protocol.to_header(perturb("Zero")) | {"strength": strength})
    assert message.strength == float(strength)


# ------------------------------------------------------------------- presenting


class Owner:
    """The attributes that a presenter needs for its snapshot."""

    def __init__(self, handles):
        cost = {"plain_seconds": None, "inspected_seconds": None, "compilations": 0}
        self.parts = {"recording": [], "handles": handles, "pending": True, "metrics": {}}
        self.parts |= {"cost": cost, "effect": lambda: (None, ""), "errors": 0, "waiting": ()}

    def snapshot(self):
        return self.parts


@pytest.fixture
def silent(monkeypatch):
    sent = []
    monkeypatch.setattr(InspectorWidget, "send", lambda self, content, *_: sent.append(content))
    return sent


def test_the_state_shows_every_kind_and_counts_what_is_compiled(silent):
    owner = Owner(
        [
            Handle(1, "a", nni.Shift(0.5, 2.0, at="input"), compiling=True),
            Handle(2, "b", nni.ClipGradient(1.5), enabled=False),
            Handle(3, "**", nni.ParameterNoise(0.1), compiling=True),
        ]
    )
    view = Presenter(owner.snapshot)
    view.state_changed()
    state = protocol.from_header(silent[-1])
    assert state.compiling == 2
    told = [(p.kind, p.at, p.acts_on, p.strength, p.strength_name) for p in state.perturbations]
    assert told == [
        ("Shift", "input", "value", 2.0, "strength"),
        ("ClipGradient", "output", "gradient", 1.5, "norm"),
        ("ParameterNoise", "parameter", "parameter", 0.1, "std"),
    ]
    assert [(p.enabled, p.pending, p.compiling) for p in state.perturbations] == [
        (True, True, True), (False, True, False), (True, True, True)
    ]  # fmt: skip
    view.close()


def elsewhere(work):
    """Run something in another thread, and wait for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return thread.ident


@pytest.mark.parametrize("kind", ["hello", "ack"])
def test_how_changes_reach_a_loop(silent, kind):
    screen = Screen()
    told, said = [], itertools.count(1)
    screen.on_listening_changed = lambda: told.append(screen.listening(None))

    def come():
        hello = {
            "type": "hello",
            "version": protocol.VERSION,
            "streams": True,
            "page": "",
            "said": next(said),
        }
        receive(screen, hello if kind == "hello" else {"type": "ack", "seq": 0})

    here = threading.get_ident()
    assert screen.listening(None) == screen.listening(here) == "after"
    come()  # the shell that runs cells, after the cell
    assert screen.listening(here) == "after"
    other = elsewhere(come)  # a subshell
    assert screen.listening(None) == screen.listening(here) == "during"
    assert screen.listening(-1) == "thread", "a loop in a thread, told beside a cell"
    come()
    assert screen.listening(other) == "thread", "and without a subshell"
    assert told == ([] if kind == "hello" else ["during", "after"]), "a hello gets everything"
    screen.close()


def test_a_hello_that_waited_behind_cells_is_not_answered_any_more(silent):
    heard = []
    screen = Screen()
    screen.handler = lambda: heard.append

    def come(page, said):
        hello = {
            "type": "hello",
            "version": protocol.VERSION,
            "streams": True,
            "page": page,
            "said": said,
        }
        receive(screen, hello)

    elsewhere(lambda: come("a", 2))  # through the subshell, while cells run
    come("a", 1)  # sent before it, and received after the cells
    assert [message.said for message in heard] == [2]
    assert screen.listening(None) == "during"
    come("b", 1)  # another page
    assert screen.listening(None) == "after"
    assert [message.page for message in heard] == ["a", "b"]
    screen.close()
