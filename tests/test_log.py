"""Holds the logging: a level a room, the rank in every record, and the program's own set-up goes first."""

import logging
import time
from itertools import product

import pytest
import tomli

from autovaruna import log
from autovaruna.config.settings import resolve
from autovaruna.errors import ConfigError, TraceError


@pytest.fixture(autouse=True)
def fresh_loggers():
    """Takes away what `configure` sets, before and after."""

    def clean():
        root = logging.getLogger("autovaruna")
        root.handlers = [handler for handler in root.handlers if not isinstance(handler, log.RankHandler)]
        for room in log.ROOMS:
            logging.getLogger(f"autovaruna.{room}").setLevel(logging.NOTSET)

    clean()
    yield
    clean()


@pytest.fixture
def conf(tmp_path):
    def write(text=""):
        (tmp_path / "logging.toml").write_text(text)
        return {"AUTOVARUNA_CONF_DIR": str(tmp_path)}

    return write


@pytest.fixture
def no_set_up(monkeypatch):
    """Returns a function that takes pytest's own handlers off the root logger, as in a program that sets up none."""
    return lambda: monkeypatch.setattr(logging.getLogger(), "handlers", [])


def level_of(room):
    return logging.getLogger(f"autovaruna.{room}").level


def test_rank_0_tells_and_the_others_warn(conf, capsys, no_set_up):
    no_set_up()
    logger = logging.getLogger("autovaruna.planner.search")
    for rank in (0, 1):
        log.configure(rank, conf())
        logger.info("planning")
        logger.warning("tight")
        log.warn_once(logger, log.RankHandler(), "what all ranks find")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[rank 0] planning", "[rank 0] tight", "[rank 0] what all ranks find", "[rank 1] tight"]


@pytest.mark.parametrize(("rank", "first_line"), [(0, ""), (3, 'other_ranks = "debug"\n')])
def test_a_level_is_one_room_s(conf, rank, first_line):
    """Other ranks can be heard, too."""
    log.configure(rank, conf(first_line + '[levels]\nruntime = "debug"\ngraph = "off"'))
    assert level_of("runtime") == logging.DEBUG
    assert level_of("graph") > logging.CRITICAL
    assert level_of("planner") == logging.INFO


def test_the_program_s_handlers_go_first(conf, capsys):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    log.configure(2, conf())
    logging.getLogger("autovaruna.runtime").warning("late")
    assert capsys.readouterr().err == ""
    assert [(record.getMessage(), record.rank) for record in records] == [("late", 2)]


def test_the_packaged_file_has_every_room():
    assert tuple(tomli.loads((log.PACKAGED / "logging.toml").read_text())["levels"]) == log.ROOMS


def failing(**settings):
    """Raises in the package, and then again, as errors that say all of an earlier one do."""
    try:
        resolve(settings)
    except ConfigError as error:
        raise TraceError("what to do") from error


def test_an_error_shows_the_scripts_own_lines_and_its_message_last():
    settings = {"num_stage": 2}
    with pytest.raises(TraceError) as caught:
        failing(**settings)
    text = log.error_text(caught.value)
    assert text.count("Traceback (most recent call last)") == 1
    assert "failing(**settings)" in text and str(log.__file__) not in text and "settings.py" not in text
    assert text.splitlines()[-1] == "autovaruna.errors.TraceError: what to do"


@pytest.mark.parametrize(("verbosity", "lines"), [("none", 1), ("short", 2), ("full", 3)])
def test_verbosity_is_for_the_rooms_that_the_user_left_at_info(conf, capsys, no_set_up, verbosity, lines):
    no_set_up()
    log.configure(0, conf('[levels]\ngraph = "error"\nruntime = "debug"'), verbosity)
    for level, room in product(("debug", "info", "warning"), ("planner", "graph")):
        getattr(logging.getLogger(f"autovaruna.{room}"), level)(level)
    shown = [f"[rank 0] {each}" for each in ("debug", "info", "warning")]
    assert capsys.readouterr().err.splitlines() == shown[-lines:]
    assert (level_of("graph"), level_of("runtime")) == (logging.ERROR, logging.DEBUG)


def test_a_long_call_shows_each_phase_once_from_when_all_are_long(caplog, monkeypatch):
    logger, now = logging.getLogger("autovaruna.test"), [0.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, logger="autovaruna.test"), log.long_call():
        for seconds, what in ((1.5, "tracing"), (0.6, "trying"), (9, "measuring"), (9, "measuring"), (0, "planning")):
            with log.long_call(), log.phase(logger, what):
                now[0] += seconds
    assert caplog.messages == ["measuring ...", "planning ..."]


def test_a_long_phase_says_so_before_it_ends(caplog, monkeypatch):
    """One of a second or more says in a line what it is; a short one says nothing."""
    logger = logging.getLogger("autovaruna.test")
    with caplog.at_level(logging.INFO, logger="autovaruna.test"):
        with log.phase(logger, "a short phase"):
            pass
        monkeypatch.setattr(log, "_LONG_SECONDS", 0.01)
        with log.phase(logger, "a long phase"):
            for _ in range(6000):
                if caplog.messages:
                    break
                time.sleep(0.01)
            assert caplog.messages == ["a long phase ..."]


def test_a_file_has_a_line_of_progress_now_and_then(capfd, monkeypatch):
    """Whoever writes into a file sees how far a command is; one that is over soon says nothing."""
    monkeypatch.setattr(log.sys, "__stderr__", log.sys.stderr)
    with log.progress_bar("counting") as advance:
        advance(1, 2)
    assert not capfd.readouterr().err
    monkeypatch.setattr(log, "_FIRST_LINE_SECONDS", 0.01)
    told = ""
    with log.status_bar() as progress:
        progress("planning: grids", 0.25)
        for _ in range(6000):
            if told := told + capfd.readouterr().err:
                break
            time.sleep(0.01)
    assert told.startswith(("planning: grids: 25%, ", "planning, "))
