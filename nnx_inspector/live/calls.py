"""Which calls begin a pass, where a loop does not mark its steps.

A pass is a call of the model. Where a program calls only parts of it, a pass is a call of the part
that it calls first; in a loop that also calls the model it waits for that call. All other calls
join the pass under way: an auxiliary loss on a layer, or a module that a backward pass calls again.
Imports no jax.
"""

from __future__ import annotations

import dataclasses

MODEL = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a module that is not within another one's.

    Attributes:
        site: the module that is called.
        leader: the site whose calls in this program are the passes.
        leads: whether it comes first, up to the leader's first call, and so may begin a pass.
        ordered: whether the calls are told in the order of the trace; those of a loop within a
            program are not, where none needs the result of another.
    """

    site: str = MODEL
    leader: str = MODEL
    leads: bool = True
    ordered: bool = True


OF_MODEL = Call()


class Calls:
    """The calls of one program, in the order of its trace."""

    def __init__(self) -> None:
        self._sites: list[str] = []

    def add(self, site: str) -> None:
        if site not in self._sites:
            self._sites.append(site)

    def call(self, site: str, *, ordered: bool = True) -> Call:
        """What the program's calls of a site are; certain when the program has been traced."""
        sites = self._sites
        leader = MODEL if MODEL in sites else sites[0]
        return Call(site, leader, sites.index(site) <= sites.index(leader), ordered)


MOST_CALLS = 1000
"""After so many calls a pass ends, even if the leader is called no more."""

FEW_CALLS = 16
"""After so many calls a pass waits no longer for the model's call in a later program."""


@dataclasses.dataclass(frozen=True)
class UnderWay:
    """The pass under way.

    Attributes:
        count: how many passes have begun.
        called: the sites called in it; None if the next call begins another.
        whole: whether the model was called in the pass before.
        calls: how many calls it has.
        setting: the perturbations in force, from its beginning to its end.
    """

    count: int = 0
    called: frozenset[str] | None = None
    whole: bool = False
    calls: int = 0
    setting: object = None

    def after(self, call: Call, setting: object) -> UnderWay:
        """The pass that this call belongs to: this one, or the next."""
        called = self.called
        if called is None or setting is not self.setting or self._ends_with(call, called):
            whole = called is not None and MODEL in called
            return UnderWay(self.count + 1, frozenset((call.site,)), whole, 1, setting)
        if call.site not in called:
            called |= {call.site}
        return UnderWay(self.count, called, self.whole, self.calls + 1, setting)

    def _ends_with(self, call: Call, called: frozenset[str]) -> bool:
        if self.calls >= MOST_CALLS:
            return call.leads
        # a program of parts alone, in a loop whose steps call the model too
        waits = call.leader != MODEL and self.whole and MODEL not in called
        if waits and self.calls < FEW_CALLS:
            return False
        again = call.ordered or call.site in called
        return call.leads and call.leader in called and again

    def ended(self) -> UnderWay:
        return dataclasses.replace(self, called=None)
