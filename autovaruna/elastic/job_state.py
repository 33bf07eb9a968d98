"""Finds the newest state of a job that is whole in memory of hosts, and hands it to the next ranks, or to the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autovaruna.checkpoint.folder import begin, commit
from autovaruna.checkpoint.remote_file import Pointer
from autovaruna.config.files import read_record
from autovaruna.elastic.job_folder import PINNED, RankPart, small_files
from autovaruna.elastic.link import Link, answers
from autovaruna.elastic.notices import EventLog

_INVENTORY_SECONDS = 60.0
_HOLD_SECONDS = 10.0
_WRITE_SECONDS = 3600.0
_WORD_SECONDS = 30.0
_NUM_KEPT = 2  # checkpoints that stay in the folder


@dataclass(frozen=True)
class HeldPart:
    """A part that a host has, and where it is in the job's folder there."""

    host: str
    place: str
    part: RankPart


@dataclass(frozen=True)
class State:
    """A state that is whole; `held` has the parts of each rank, those of its host first."""

    step: int
    attempt: int  # the run that has made it
    held: Mapping[int, Sequence[HeldPart]]
    age_seconds: float

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.attempt

    @property
    def hosts(self) -> list[str]:
        """The hosts that it comes from."""
        return sorted({held[0].host for held in self.held.values()})


def find_state(links: Sequence[Link], within: str = "", aside: Collection[tuple[int, int]] = ()) -> State | None:
    """Returns the newest state of which every part is on a host that answers, intact; None: there is none.

    It is of a step that ranks of its run have reported, or of the next, and none of those that were put `aside`.
    """
    asked = {link.host: link.ask("inventory", within=within) for link in links}
    found: dict[tuple[int, int, int], dict[int, list[HeldPart]]] = {}
    reported: dict[int, int] = {}
    ages: dict[tuple[int, int], float] = {}
    for host, entries in answers(asked, _INVENTORY_SECONDS).items():
        for entry in entries:
            part, attempt = read_record(entry["part"], RankPart), entry["attempt"]
            held, key = HeldPart(host, entry["place"], part), (part.step, attempt)
            places = found.setdefault((*key, part.num_ranks), {}).setdefault(part.rank, [])
            places.insert(0 if "copy-" not in held.place else len(places), held)
            reported[attempt] = max(reported.get(attempt, -1), entry["reported"])
            ages[key] = min(ages.get(key, entry["age"]), entry["age"])
    whole = [key for key, held in found.items() if held.keys() == set(range(key[2]))]
    fit = [key for key in whole if key[0] <= reported[key[1]] + 1 and key[:2] not in aside]
    return State(*max(fit)[:2], found[max(fit)], ages[max(fit)[:2]]) if fit else None


def hand_out(
    state: State, hosts: Collection[str], links: Mapping[str, Link], unreached: Collection[tuple[str, str]] = ()
) -> dict[str, str]:
    """Has each host link its files of a state, and point to those of others; returns those that cannot, with why.

    What lies on a host that it is known not to reach, it reads by a third one that reaches that.
    """
    texts = small_files([held[0].part for _, held in sorted(state.held.items())])
    asked: dict[str, Future[Any]] = {}
    failed: dict[str, str] = {}
    for host in hosts:
        own: dict[str, str] = {}
        others: dict[str, Any] = {}
        for held in state.held.values():
            near = sorted(
                held, key=lambda each: (each.host != host, (host, each.host) in unreached, each.host not in hosts)
            )
            source, place = near[0].host, near[0].place  # of hosts that are left out last: not all may reach them
            if (host, source) in unreached:
                third = [each for each in hosts if not {(host, each), (each, source)} & {*unreached}]
                if not third:
                    failed[host] = f"it does not reach {source}, which alone has a part of step {state.step}"
                source, place = next(iter(third), source), "restore"
            for name in near[0].part.files:
                where = f"{place}/{name}"
                if source == host:
                    own[name] = where
                else:
                    others[name] = asdict(Pointer(links[source].address, links[source].port, source, where))
        asked[host] = links[host].ask("restore", texts=texts, own=own, others=others)
    done = answers(asked, _INVENTORY_SECONDS)
    late = {host: str(answer.done() and answer.exception()) for host, answer in asked.items() if host not in done}
    return failed | late


class Checkpoints:
    """Writes states in memory of hosts to disk as checkpoints, every so many seconds, while their ranks go on."""

    def __init__(self, folder: str | None, seconds: float, log: EventLog) -> None:
        self._folder = folder
        self._seconds = seconds
        self._log = log
        self._last = time.monotonic()
        self._step = -1
        self.aside: set[tuple[int, int]] = set()  # states, by step and run, that could not be loaded
        self._thread: threading.Thread | None = None

    def save_if_due(self, links: Sequence[Link]) -> None:
        """Has keepers write what they hold to disk, in a thread."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._folder is None or is_busy or time.monotonic() - self._last < self._seconds:
            return
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self.save, args=(links,), daemon=True)
        self._thread.start()

    def finish(self, links: Sequence[Link] | None, most_seconds: float) -> str:
        """Waits for what is being written, and writes the newest state of hosts, if they are given; says so meanwhile.

        Returns why that failed, or took too long, empty if it did not.
        """
        deadline, faults = time.monotonic() + most_seconds, [""]
        before = self._thread

        def write() -> None:
            if before is not None:
                before.join()
            if links is not None:
                faults[0] = self.save(links)

        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()
        while (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, _WORD_SECONDS))
            if not self._thread.is_alive():
                return faults[0]
            self._log.record("waiting", f"waiting for {self._folder} to take a checkpoint, for {left:.0f} s at most")
        self._log.record("waiting", fault := f"{self._folder} has not taken the checkpoint within {most_seconds:g} s")
        return fault

    def save(self, links: Sequence[Link]) -> str:
        """Writes the newest state that some hosts have; returns, and records, why that failed, empty if it did not."""
        assert self._folder is not None
        try:
            for do in ("hold", "pin"):
                answers({link.host: link.ask(do) for link in links}, _HOLD_SECONDS)
            state = find_state(links, PINNED, self.aside)
            if state is None:
                return "no state of the hosts is whole"
            if state.step != self._step:
                path = self._write(state, {link.host: link for link in links}, self._folder)
                self._step = state.step
                self._log.record("checkpoint", f"step {state.step} is on disk: {path}", step=state.step, path=str(path))
        except Exception as error:
            self._log.record("checkpoint", f"no checkpoint could be written: {error}")
            return str(error)
        finally:
            answers({link.host: link.ask("unpin") for link in links}, _HOLD_SECONDS)
        return ""

    def _write(self, state: State, links: Mapping[str, Link], root: str) -> Path:
        """Has hosts write a state that they have pinned; returns the checkpoint's folder."""
        chosen = [held[0] for _, held in sorted(state.held.items())]
        with ExitStack() as locks:
            partial = begin(Path(root).absolute(), state.step, locks)
            asked = []
            for host in {held.host for held in chosen}:
                places = [held.place for held in chosen if held.host == host]
                asked.append(links[host].ask("save", places=places, partial=os.fspath(partial)))
            for answer in asked:
                answer.result(_WRITE_SECONDS)
            texts = {name: text.encode() for held in chosen for name, text in held.part.extra_files.items()}
            return commit(partial, state.step, [held.part for held in chosen], texts, _NUM_KEPT)
