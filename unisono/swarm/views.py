"""Members and views as data: `Member`, `Bars`, `View` and `Ballot`, and their forms on the wire.

A *view* is a numbered list of members. It says which call the members make next. All calls of a view have the
contributions of all its members, or none.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from unisono.foundation.json_checks import checked
from unisono.transports.host.bind_address import is_numeric

_ID_NBYTES = 8
MOST_MEMBERS = 256
MOST_NAME = 64
MOST_BARRED = 256
_CERTIFICATE_NDIGITS = 64
_MEMBER = {"id": str, "name": str, "host": str, "port": int, "certificate": str}
_BARS = {"names": [str], "certificates": [str]}
_VIEW = {"id": str, "number": int, "base": str, "next_call": int, "members": list, "barred": _BARS}


class Member(NamedTuple):
    """A process of a swarm.

    Attributes:
        id: its number, which no other process has. A process that enters again has a new one.
        name: its name, for people.
        host, port: the numeric address and the port at which it answers requests.
        certificate: the SHA-256 of the public key of its certificate, in hex; empty if the members have none.
    """

    id: str
    name: str
    host: str
    port: int
    certificate: str = ""

    def __str__(self) -> str:
        return self.name


class Bars(NamedTuple):
    """The processes that were expelled for good, and may not enter again.

    Attributes:
        names: their names.
        certificates: their certificates, as of `Member`.
    """

    names: frozenset[str] = frozenset()
    certificates: frozenset[str] = frozenset()

    def bar(self, member: Member) -> bool:
        """Return whether a process may not enter."""
        return member.name in self.names or member.certificate in self.certificates

    def joined(self, other: Bars) -> Bars:
        """Return the bars of both."""
        return Bars(self.names | other.names, self.certificates | other.certificates)


NO_BARS = Bars()


class View(NamedTuple):
    """A numbered list of members.

    Attributes:
        id: its identity. Two parts of a cut network could have views of the same number, but not of the same id.
        number: the number of views before it, from 1.
        base: the id of the view before it; empty for the first one.
        next_call: the number of the first call that its members make. All calls before it have ended.
        members: in the order of their ranks.
        barred: the processes that were expelled for good.
    """

    id: str
    number: int
    base: str
    next_call: int
    members: tuple[Member, ...]
    barred: Bars = NO_BARS

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the members."""
        return tuple(member.id for member in self.members)

    def bars_of(self, id_: str) -> Bars:
        """Return the bars of a member: of its name, and of its certificate unless another member has the same."""
        names = {member.name for member in self.members if member.id == id_}
        own = {member.certificate for member in self.members if member.id == id_}
        others = {member.certificate for member in self.members if member.id != id_}
        return Bars(frozenset(names), frozenset(own - others - {""}))


class Ballot(NamedTuple):
    """The number of an attempt to choose a view. Two members never make the same one.

    Attributes:
        number: counts attempts, from 1.
        proposer: the id of the member that makes the attempt.
    """

    number: int
    proposer: str


NO_BALLOT = Ballot(0, "")


def new_id() -> str:
    """Return an identity that nobody else has."""
    return os.urandom(_ID_NBYTES).hex()


def member_of(fields: Any) -> Member:
    """Return the member in a value from another process; raises ValueError if it is none."""
    checked(fields, _MEMBER, "a member")
    member = Member(**{name: fields[name] for name in _MEMBER})
    is_named = 0 < len(member.name) <= MOST_NAME and len(member.id) == 2 * _ID_NBYTES
    is_certified = len(member.certificate) in (0, _CERTIFICATE_NDIGITS)
    if not (is_named and is_certified and 0 < member.port < 1 << 16 and is_numeric(member.host)):
        raise ValueError("a member is out of range")
    return member


def view_of(fields: Any) -> View:
    """Return the view in a value from another process; raises ValueError if it is none."""
    checked(fields, _VIEW, "a view")
    members = tuple(member_of(member) for member in fields["members"][: MOST_MEMBERS + 1])
    barred = bars_of(fields["barred"])
    view = View(**{**{name: fields[name] for name in _VIEW}, "members": members, "barred": barred})
    if not 0 < len(members) <= MOST_MEMBERS or len(set(view.ids)) < len(members) or view.number < 1:
        raise ValueError("a view is out of range")
    return view


def bars_of(fields: Any) -> Bars:
    """Return the bars in a value from another process; raises ValueError if it has none."""
    checked(fields, _BARS, "bars")
    barred = Bars(*(frozenset(fields[kind][:MOST_BARRED]) for kind in _BARS))
    if any(len(name) > MOST_NAME for names in barred for name in names) or "" in barred.certificates:
        raise ValueError("a bar is out of range")
    return barred


def bars_fields(barred: Bars) -> dict[str, list[str]]:
    """Return bars in the form for other processes."""
    return {kind: sorted(names)[:MOST_BARRED] for kind, names in barred._asdict().items()}


def view_fields(view: View) -> dict[str, Any]:
    """Return a view in the form for other processes."""
    return {
        **view._asdict(),
        "members": [member._asdict() for member in view.members],
        "barred": bars_fields(view.barred),
    }


def ballot_of(fields: Any) -> Ballot:
    """Return the ballot in a value from another process; raises ValueError if it is none."""
    checked(fields, {"number": int, "proposer": str}, "a ballot")
    return Ballot(fields["number"], fields["proposer"])
