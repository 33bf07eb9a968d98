"""Finds the newest state that the hosts of a job have whole, and puts it where the next ranks find it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autovaruna.checkpoint.elsewhere import Pointer
from autovaruna.checkpoint.part import RankPart, small_files
from autovaruna.config.files import read_record
from autovaruna.elastic.link import Link, answers

_INVENTORY_SECONDS = 60.0


@dataclass(frozen=True)
class Held:
    """A part that a host has.

    Attributes:
        host: the host.
        attempt: the run of the job that wrote it.
        place: where it is in the job's folder there.
        part: what it is.
    """

    host: str
    attempt: int
    place: str
    part: RankPart


@dataclass(frozen=True)
class State:
    """A state that is whole.

    Attributes:
        step: its step.
        held: by rank of the run that wrote it, the hosts that have the rank's part, the rank's own first.
    """

    step: int
    held: Mapping[int, Sequence[Held]]

    @property
    def hosts(self) -> list[str]:
        """The hosts that it comes from."""
        return sorted({held[0].host for held in self.held.values()})


def find_state(links: Sequence[Link]) -> State | None:
    """Returns the newest state of which every part is on a host that answers, intact; None: there is none."""
    asked = {link.host: link.ask("inventory") for link in links}
    found: dict[tuple[int, int, int], dict[int, list[Held]]] = {}
    for host, entries in answers(asked, _INVENTORY_SECONDS).items():
        for entry in entries:
            part = read_record(entry["part"], RankPart)
            held = Held(host, entry["attempt"], entry["place"], part)
            places = found.setdefault((part.step, held.attempt, part.num_ranks), {}).setdefault(part.rank, [])
            places.insert(0 if "copy-" not in held.place else len(places), held)
    whole = [key for key, held in found.items() if held.keys() == set(range(key[2]))]
    return State(max(whole)[0], found[max(whole)]) if whole else None


def hand_out(state: State, links: Sequence[Link], ports: Mapping[str, Link]) -> None:
    """Puts a state together on each host: files that it has itself, and where the others are.

    Args:
        state: The state.
        links: The hosts of the next run.
        ports: Every host that answers, by name.

    Raises:
        OSError: a host cannot.
    """
    texts = small_files([held[0].part for _, held in sorted(state.held.items())])
    asked: list[Any] = []
    for link in links:
        own: dict[str, str] = {}
        others: dict[str, Any] = {}
        for held in state.held.values():
            here = next((each for each in held if each.host == link.host), None)
            chosen = here or held[0]
            for name in chosen.part.files:
                where = f"{chosen.place}/{name}"
                if here is not None:
                    own[name] = where
                else:
                    keeper = ports[chosen.host]
                    others[name] = asdict(Pointer(keeper.address, keeper.port, where))
        asked.append(link.ask("restore", texts=texts, own=own, others=others))
    for answer in asked:
        answer.result(_INVENTORY_SECONDS)
