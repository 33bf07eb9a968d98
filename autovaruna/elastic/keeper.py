"""Is the keeper of a host: a process outside of mpirun that outlives ranks, holds their snapshots, and serves them.

The manager starts it, over ssh on other hosts, and speaks with it over its standard streams, in lines of JSON. The
first is the job's settings and the host's credentials, so that neither shows in any list of processes. Keepers, and new
ranks, read each other's snapshots over connections that only those can open who have such. A keeper whose manager is
silent ends the ranks of its host, and holds what they have written for `keep_seconds`: a manager of this job that
starts another keeper meanwhile has that one take over.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autovaruna.checkpoint.remote_file import CREDENTIALS, Pointer, open_bytes
from autovaruna.config.files import copy_synced, read_record, write_whole
from autovaruna.elastic.copies import CopyPace, send_part
from autovaruna.elastic.host_processes import (
    SILENT_SECONDS,
    acquire_from_abandoned,
    acquire_lock,
    end_all,
    is_alive,
    memory_kills,
    processes_with,
    record_word,
    state_of,
    versions,
)
from autovaruna.elastic.job_folder import (
    AHEAD,
    ALONE,
    COPIED,
    FULL,
    HOLD,
    LEAVE,
    NOT_FULL,
    NUM_RANKS,
    PINNED,
    RECORD,
    REFUSED,
    Progress,
    RankPart,
    attempt_folder,
    clear_slot,
    folders_in,
    number_in,
    read_part,
    read_predicted,
    read_work,
    record_full,
    slots_of,
    write_record,
)
from autovaruna.elastic.standby import LOCK, SOCKET, StandbyProcess
from autovaruna.ranks.launcher import own_and_old, remove_leftovers
from autovaruna.ranks.system import process_file
from autovaruna.ranks.tls import MOST_BYTES, Connection, Credentials, Server, connect

_LOOK_SECONDS = 0.02
_NEW_RANKS_SECONDS = 0.2  # between two looks for ranks that have come
_PATIENCE_SECONDS = 5.0
_HICCUP_SECONDS = 0.5
_HURRY_SECONDS = 3.0  # that a connection to another keeper may take, so that a firewall is told of soon
_ALONE_SECONDS = 8.0  # after so long without copies, longer than a lost host goes unnoticed, ranks go on without
_PAGE_BYTES = 4096


@dataclass
class Attempt:
    """The run of the job that goes on now; `buddy` is the keeper that gets copies: its address, port and name."""

    number: int
    num_ranks: int
    buddy: tuple[str, int, str] | None


class Keeper:
    """The part of a job that a host keeps in a folder in memory; `file` is one more file to remove at the job's end."""

    def __init__(
        self, folder: Path, own: Credentials, standby: StandbyProcess | None, copy_share: float, file: str = ""
    ) -> None:
        self.folder = folder
        self._own = own
        self._copy_share = copy_share
        self._file = file
        self._standby, self._is_ready = standby, standby is None
        self._first_kills = memory_kills()
        self._attempt: Attempt | None = None
        self._copied: tuple[int, int] | None = None
        self._copy_fault = ""
        self._copied_at = 0.0  # when something has been copied last, or there was nothing to, on the monotonic clock
        self._copy_seconds = 0.0  # that the last step's copies took
        self._kept: int | None = None  # the newest step of earlier runs, which no run has come to; None: none is kept
        self.port = Server(own, self._answer).port
        self._copies: dict[Path, Path] = {}
        self._gone: dict[str, float] = {}
        threading.Thread(target=self._watch_ranks, daemon=True).start()

    # what the manager asks for

    def begin(self, number: int, num_ranks: int, buddy: list[Any] | None) -> None:
        """Gets ready for an attempt, and ends what is left here of earlier ones."""
        for folder in folders_in(self.folder, "attempt-") if self._attempt is None else ():  # of a keeper before
            if _number_of(folder) < number:
                self.end(_number_of(folder), "")
        folder = attempt_folder(self.folder, number)
        folder.mkdir(mode=0o700, exist_ok=True)
        if number_in(folder / NUM_RANKS) != num_ranks:
            (folder / NUM_RANKS).write_text(str(num_ranks))
        self._kept = self._newest_before(number)
        for name in (LEAVE, HOLD, REFUSED):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            os.replace(self.folder / FULL, self.folder / NOT_FULL)
        (self.folder / NOT_FULL).touch()
        self._first_kills = memory_kills()
        self._copied, self._copy_fault, self._copied_at, self._copy_seconds = None, "", time.monotonic(), 0.0
        (folder / ALONE).unlink(missing_ok=True)
        self._copies.clear()
        self._gone = {}
        to = None if buddy is None else (str(buddy[0]), int(buddy[1]), str(buddy[2]))
        self._attempt = attempt = Attempt(number, num_ranks, to)
        if buddy is not None:
            threading.Thread(target=self._copy_on, args=(attempt,), daemon=True).start()

    def ping(self, known: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns how far the ranks of this host are, with their work in calls after those that are `known`."""
        ranks = {}
        predicted: dict[str, float] = {}
        for folder in self._rank_folders():
            if (progress := Progress.read(folder)) is not None:
                rank, now = str(_number_of(folder)), time.monotonic()
                work = [each for each in read_work(folder) if each[0] > (known or {}).get(rank, -1)]
                more = {"state": state_of(progress.process), "gone_seconds": now - self._gone.get(folder.name, now)}
                ranks[rank] = {**asdict(progress), **more, "work": work}
                predicted = predicted or ({} if known else read_predicted(folder))
        attempt, is_late = self._attempt, self._copy_fault and time.monotonic() > self._copied_at + _HICCUP_SECONDS
        return {
            "attempt": None if attempt is None else attempt.number,
            "ranks": ranks,
            "predicted": predicted,
            "newest": _newest_of(self._held_steps().values()),
            "copied": self._copied,
            "copy_seconds": self._copy_seconds,
            "copy_fault": [attempt.buddy[2], self._copy_fault] if attempt and attempt.buddy and is_late else None,
            "is_alone": attempt is not None and (attempt_folder(self.folder, attempt.number) / ALONE).exists(),
            "kept": self._kept,
            "is_full": (self.folder / FULL).exists(),
            "refused": (self.folder / REFUSED).read_text() if (self.folder / REFUSED).exists() else "",
            "standby_fault": self._standby.fault if self._standby and not self._is_ready else "",
            "is_ready": self._is_ready or (self.folder / SOCKET).exists(),
            "memory_kills": memory_kills() - self._first_kills,
        }

    def leave(self) -> None:
        """Has the ranks end at the next border between two steps."""
        (self.folder / LEAVE).touch()

    def hold(self) -> None:
        """Stops the ranks from writing snapshots, until `pin` or `unpin`, so that all hosts pin one step."""
        (self.folder / HOLD).touch()

    def pin(self) -> None:
        """Links the files of what is whole into a folder; from now on the ranks write new files beside them."""
        self.unpin()
        for slot in self._slots(""):
            if (part := read_part(slot)) is not None:
                place = self.folder / PINNED / slot.relative_to(self.folder)
                place.mkdir(parents=True, mode=0o700)
                with suppress(OSError):  # it is written to just now
                    for name in (*part.files, RECORD):  # with a record at last, nobody has begun to write
                        os.link(slot / name, place / name)
        (self.folder / HOLD).unlink(missing_ok=True)

    def unpin(self) -> None:
        """Ends what `hold` and `pin` began."""
        (self.folder / HOLD).unlink(missing_ok=True)
        shutil.rmtree(self.folder / PINNED, ignore_errors=True)

    def end(self, number: int, namespace: str) -> int:
        """Kills the processes of an attempt on this host, and removes what Open MPI leaves; returns how many they were.

        `namespace` is what Open MPI calls the job; empty: it has not started it.
        """
        ranks = [progress.process for folder in self._rank_folders() if (progress := Progress.read(folder))]
        self._attempt = None
        num_ended = end_all(f'{json.dumps(str(self.folder))}, "attempt": {number},'.encode())
        if namespace:
            num_ended += end_all(namespace.encode())
        deadline = time.monotonic() + _PATIENCE_SECONDS  # the standby process ends those that it has forked
        while any(map(is_alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        remove_leftovers(least_seconds=0.0)
        return num_ended

    def inventory(self, within: str = "") -> list[dict[str, Any]]:
        """Returns the intact parts on this host: of its own ranks, and copies of others'."""
        with ThreadPoolExecutor(8) as pool:
            return [each for each in pool.map(self._entry, self._slots(within)) if each is not None]

    def _slots(self, within: str) -> list[Path]:
        attempts = folders_in(self.folder / within, "attempt-")
        return [slot for attempt in attempts for rank in folders_in(attempt, "") for slot in slots_of(rank)]

    def _entry(self, slot: Path) -> dict[str, Any] | None:
        part, number = read_part(slot), _number_of(slot.parent.parent)
        folder = attempt_folder(self.folder, number)
        if part is None or part.num_ranks != number_in(folder / NUM_RANKS) or not part.is_intact(slot):
            return None
        reports = filter(None, map(Progress.read, folders_in(folder, "rank-")))
        reported = max((max(its.steps, *its.snapshots) for its in reports), default=-1)
        place, age = str(slot.relative_to(self.folder)), time.monotonic() - (slot / RECORD).stat().st_mtime
        return {"attempt": number, "reported": reported, "place": place, "age": age, "part": asdict(part)}

    def restore(self, texts: Mapping[str, str], own: Mapping[str, str], others: Mapping[str, Any]) -> None:
        """Puts a state together for the next ranks: texts by name, where files of this host are, and `Pointer`s."""
        place = self.folder / "restore"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        for name, text in texts.items():
            (place / name).write_text(text)
        for name, where in own.items():
            os.link(self._inside(where), place / name)
        for name, pointer in others.items():
            read_record(pointer, Pointer).write(place / name)

    def drop(self, before: int, step: int) -> None:
        """Removes the files of earlier attempts, those apart that hold a newer step, and what was put together."""
        for folder in folders_in(self.folder, "attempt-"):
            if _number_of(folder) < before and _newest_in(folder) <= step:
                shutil.rmtree(folder, ignore_errors=True)
        self._kept = self._newest_before(before)
        shutil.rmtree(self.folder / "restore", ignore_errors=True)
        self._plan_ahead()

    def _newest_before(self, number: int) -> int | None:
        """Returns the newest step that earlier attempts hold here, -1 if nothing; None: there are none."""
        earlier = [each for each in folders_in(self.folder, "attempt-") if _number_of(each) < number]
        return max(map(_newest_in, earlier), default=None)

    def _plan_ahead(self) -> None:
        """Starts a process that plans for fewer ranks, if a rank of this host has asked for it."""
        asked, taken = self.folder / AHEAD, self.folder / f"taken-{AHEAD}"
        with suppress(OSError):
            asked.replace(taken)
            with open(self.folder / "ahead.log", "wb") as log:
                call = [sys.executable, "-m", "autovaruna.elastic.ahead", str(taken)]
                process = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            threading.Thread(target=process.wait, daemon=True).start()

    def save(self, places: list[str], partial: str) -> None:
        """Writes parts of this host to a checkpoint's folder on disk; no others stay pinned."""
        for slot in self._slots(PINNED):
            if str(slot.relative_to(self.folder)) not in places:
                shutil.rmtree(slot, ignore_errors=True)
        for place in places:
            slot = self._inside(place)
            part = read_part(slot)
            if part is None:
                raise OSError(f"{place} has gone")
            for name in part.files:
                copy_synced(slot / name, Path(partial, name))

    def end_ranks(self) -> None:
        """Ends the ranks of this host."""
        attempt = self._attempt
        if attempt is not None:
            self.end(attempt.number, "")

    def quit(self) -> None:
        """Removes all that is the job's on this host."""
        self.end_ranks()
        for file in (SOCKET, f"taken-{AHEAD}"):  # which the job's other processes have in their command lines
            end_all(str(self.folder / file).encode())
        if self._file:
            Path(self._file).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch_ranks(self) -> None:
        """Records when each rank's process is gone: the first one is why others follow."""
        while True:
            gone, files = self._gone, dict[int, str]()  # those of this run: the next one has others
            for folder in self._rank_folders():
                progress = Progress.read(folder) if folder.name not in gone else None
                if progress is not None:
                    try:
                        files[process_file(progress.process)] = folder.name
                    except OSError:  # it has gone, or the system is too old for this
                        if not is_alive(progress.process):
                            gone[folder.name] = time.monotonic()
            for file in select.select(files, [], [], _NEW_RANKS_SECONDS)[0]:
                gone[files[file]] = time.monotonic()
            for file in files:
                os.close(file)

    # copies on another host

    def _copy_on(self, attempt: Attempt) -> None:
        """Copies each step to another host until the attempt is over, and tells the ranks which step is there."""
        alone = attempt_folder(self.folder, attempt.number) / ALONE
        while self._attempt is attempt:
            pace = CopyPace(self._copy_share, lambda: self._is_hurried(attempt))
            try:
                assert attempt.buddy is not None
                address, port, name = attempt.buddy
                with connect(address, port, self._own, name, _HURRY_SECONDS) as connection:
                    while self._attempt is attempt:
                        self._copy_newest(attempt, connection, pace)
                        self._copied_at = time.monotonic()
                        alone.unlink(missing_ok=True)
                        time.sleep(_LOOK_SECONDS)
            except (OSError, EOFError, ValueError) as error:  # if the other host is gone, the manager knows
                if self._attempt is not attempt:
                    return
                record_full(self.folder, error)
                self._copy_fault = str(error)
                self._copied_at = max(self._copied_at, pace.arrived_at)
                if time.monotonic() > self._copied_at + _ALONE_SECONDS:
                    with suppress(OSError):
                        alone.touch()
                time.sleep(10 * _LOOK_SECONDS)

    def _is_hurried(self, attempt: Attempt) -> bool:
        """Says whether ranks are to leave, or wait for their last copies; OSError once the attempt is over."""
        if self._attempt is not attempt:
            raise OSError("the attempt is over")
        return (self.folder / LEAVE).exists()

    def _copy_newest(self, attempt: Attempt, connection: Connection, pace: CopyPace) -> None:
        """Copies the newest step that all ranks of this host have, unless that is done."""
        held = self._held_steps()
        step, begin = _newest_of(held.values()), time.monotonic()
        if step is None or self._copied == (attempt.number, step):
            return
        for folder, steps in held.items():
            send_part(connection, slots_of(folder)[steps.index(step)], attempt.number, pace)
        self._copied, self._copy_seconds = (attempt.number, step), time.monotonic() - begin
        write_whole(attempt_folder(self.folder, attempt.number) / COPIED, str(step), is_synced=False)

    def _held_steps(self) -> dict[Path, Sequence[int]]:
        """Returns the steps in the slots of each rank of this host, by its folder; -1: nothing whole."""
        ranks = {folder: Progress.read(folder) for folder in self._rank_folders()}
        return {folder: () if progress is None else progress.snapshots for folder, progress in ranks.items()}

    def _receive_part(self, connection: Connection, request: Mapping[str, Any]) -> None:
        part, attempt = read_record(request["part"], RankPart), self._attempt
        own = None if attempt is None else (attempt.number, attempt.num_ranks)
        if (request["attempt"], part.num_ranks) != own or not 0 <= part.rank < part.num_ranks:
            raise ValueError("it is not of this run")
        folder = attempt_folder(self.folder, int(request["attempt"])) / f"copy-{part.rank:05d}"
        slot = self._slot_of_copy(folder)
        clear_slot(slot, part.files)
        for name, record in part.files.items():
            if name != os.path.basename(name):
                raise ValueError(f"{name!r} is no name of a file")
            with open(slot / name, "r+b" if (slot / name).exists() else "wb") as file:
                while file.tell() < record.size:
                    file.write(connection.recv_bytes())
                    connection.send_bytes(b"")
                file.truncate()
        if not part.is_intact(slot):
            raise ValueError("it was changed on its way")
        write_record(slot, part)
        self._copies[folder] = slot
        connection.send_bytes(b"taken")

    def _slot_of_copy(self, folder: Path) -> Path:
        """Returns the slot of a rank's copies that has the older one."""
        slots = slots_of(folder)
        if folder in self._copies:
            return slots[1 - slots.index(self._copies[folder])]
        return min(slots, key=lambda each: -1 if (its := read_part(each)) is None else its.step)

    def full_folder(self) -> str:
        """Returns the folder for temporary files, if it has no room, or no inodes; empty: it has."""
        room = os.statvfs(folder := os.environ.get("TMPDIR", "/tmp"))  # tempfile goes elsewhere if that is full
        return folder if not room.f_bavail or (room.f_files and not room.f_favail) else ""

    # other keepers and ranks

    def reach(self, others: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Returns why keepers of other hosts, each by its name, address and port, cannot be reached from this one."""

        def try_one(other: Sequence[Any]) -> str:
            name, address, port = other
            try:
                connect(address, port, self._own, name, _HURRY_SECONDS).close()
            except OSError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(16) as pool:
            found = zip(others, pool.map(try_one, others), strict=True)
            return {name: fault for (name, _, _), fault in found if fault}

    def _answer(self, connection: Connection, request: Mapping[str, Any]) -> None:
        if "part" in request:
            try:
                self._receive_part(connection, request)
            except OSError as error:
                record_full(self.folder, error)
                raise
            return
        with open_bytes(self._inside(request["read"])) as read_into:  # also what another keeper has, for a third one
            data = memoryview(bytearray(min(int(request["count"]), MOST_BYTES)))
            connection.send_bytes(data[: read_into(data, int(request["offset"]))])

    def _inside(self, place: str) -> Path:
        path = (self.folder / place).resolve()
        if not path.is_relative_to(self.folder.resolve()) or path.name == CREDENTIALS:
            raise OSError(f"{place} is not in the job's folder")
        return path

    def _rank_folders(self) -> list[Path]:
        attempt = self._attempt
        return [] if attempt is None else folders_in(attempt_folder(self.folder, attempt.number), "rank-")


def _number_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def _newest_in(attempt: Path, prefix: str = "") -> int:
    """Returns the newest step of which an attempt's folder has a part, of ranks or also copies; -1: none."""
    slots = (slot for rank in folders_in(attempt, prefix) for slot in slots_of(rank))
    return max((part.step for part in map(read_part, slots) if part is not None), default=-1)


def _newest_of(held: Collection[Sequence[int]]) -> int | None:
    """Returns the newest step that each of some ranks has; None: there is none."""
    return max((step for step in set.intersection(*map(set, held)) if step >= 0), default=None) if held else None


class StandardStreams:
    """Requests on standard input, answers on standard output; each request is recorded in the file `lock`."""

    def __init__(self, keeper: Keeper, lock: int) -> None:
        self._keeper = keeper
        self._held_lock = lock
        self._lock = threading.Lock()
        self._last_word = time.monotonic()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Writes a line."""
        with self._lock, suppress(OSError):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    def follow(self) -> bool:
        """Answers requests until the manager has gone; says whether it has asked to remove all."""
        with ThreadPoolExecutor(4) as pool:
            for text in sys.stdin:
                self._last_word = time.monotonic()
                record_word(self._held_lock)
                request = json.loads(text)
                if request["do"] == "quit":
                    return True
                if request["do"] == "ping":  # never behind what takes long
                    self._answer(request)
                else:
                    pool.submit(self._answer, request)
        return False

    def _answer(self, request: dict[str, Any]) -> None:
        number, do = request.pop("id"), request.pop("do")
        try:
            self.write({"id": number, "result": getattr(self._keeper, do)(**request)})
        except Exception as error:
            self.write({"id": number, "error": f"{type(error).__name__}: {error}"})

    def end_if_silent(self, keep_seconds: float) -> None:
        """Ends the ranks, and later the keeper, if the manager is silent while this process runs."""
        num_silent = 0
        while num_silent < SILENT_SECONDS + keep_seconds:
            before = self._last_word
            time.sleep(1.0)
            num_silent = num_silent + 1 if self._last_word == before else 0
            if num_silent == SILENT_SECONDS:
                self._keeper.end_ranks()
        self._keeper.quit()
        os._exit(1)


def _faults_of_host(settings: Mapping[str, Any]) -> str:
    """Says why the script cannot run here as it does where the manager is; empty: nothing is known of that."""
    own = versions()
    wanted = settings.get("versions", own).items()
    found = [f"{name} {own[name] or 'is missing'}, {its} expected" for name, its in wanted if own[name] != its]
    missing = [f"there is no {file}" for file in settings.get("files", ()) if not os.path.exists(file)]
    return "; ".join(found + missing)


def _remove_abandoned(folder: Path) -> None:
    """Removes the folders, beside a job's, of jobs of this user all of whose processes were killed on this host."""
    prefix, _, _ = folder.name.rpartition("-")
    others = [other for other in folders_in(folder.parent, f"{prefix}-") if other != folder and not other.is_symlink()]
    for lock in own_and_old(other / LOCK for other in others):
        with suppress(OSError):
            if not processes_with(os.fsencode(lock.parent)) and (file := acquire_lock(lock)) is not None:
                shutil.rmtree(lock.parent, ignore_errors=True)
                os.close(file)


def main() -> None:
    """Is the process: ``python -m autovaruna.elastic.keeper``."""
    settings = json.loads(sys.stdin.readline())
    folder, own = Path(settings["folder"]), read_record(settings["credentials"], Credentials)
    os.umask(0o077)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        sys.exit(f"keeper: {folder} is somebody else's")
    lock = acquire_from_abandoned(folder / LOCK)
    if lock is None:
        sys.exit(f"keeper: another one holds {folder}")
    shown = json.dumps(asdict(own)).encode().ljust(_PAGE_BYTES)  # in place: memory may be full by now
    with open(folder / CREDENTIALS, "r+b" if (folder / CREDENTIALS).exists() else "wb") as file:
        file.write(shown)
    _remove_abandoned(folder)
    standby = StandbyProcess(folder, settings.get("libraries", ())) if settings["standby"] else None
    keeper = Keeper(folder, own, standby, settings["copy_share"], settings.get("file", ""))
    line = StandardStreams(keeper, lock)
    attempts = folders_in(folder, "attempt-")
    held = max(((_newest_in(each, "rank-"), _number_of(each)) for each in attempts), default=(-1, 0))
    newest, faults = max(map(_number_of, attempts), default=0), _faults_of_host(settings)
    line.write({"port": keeper.port, "host": socket.gethostname(), "attempt": newest, "held": held, "fault": faults})
    keep_seconds = settings["keep_seconds"]
    threading.Thread(target=line.end_if_silent, args=(keep_seconds,), daemon=True).start()
    if not line.follow():
        keeper.end_ranks()
        time.sleep(keep_seconds)
    keeper.quit()
    os._exit(0)


if __name__ == "__main__":
    main()
