"""Holds the settings: one table, three sources, the later wins, and errors that name place, key and the nearest."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import tomli

import autovaruna
from autovaruna.config.settings import Settings, declarations, log_settings, meanings, named_settings, resolve
from autovaruna.errors import ConfigError
from autovaruna.planner.problem import Constraints

PACKAGE = Path(autovaruna.__file__).parent
CONF = PACKAGE / "conf"
KEYWORD_ONLY = {"micro_batch_weight"}
NAMES = [each.name for each in declarations()]


@pytest.fixture
def conf(tmp_path):
    """Returns a function that writes a conf.toml and gives the environment that points to it."""

    def write(text="", **variables):
        (tmp_path / "conf.toml").write_text(text)
        return {"AUTOVARUNA_CONF_DIR": str(tmp_path), **variables}

    return write


def refused(keywords=None, environ=None):
    with pytest.raises(ConfigError) as caught:
        resolve(keywords or {}, environ or {})
    return str(caught.value)


def test_without_sources_all_is_default(conf):
    settings = resolve({}, conf())
    assert settings == Settings()
    assert {settings.source_of(name) for name in NAMES} == {"default"}


def test_the_later_source_wins(conf, tmp_path):
    text = "num_stages = 2\nnum_replicas = 2\nnum_micro_batches = 2"
    environ = conf(text, AUTOVARUNA_NUM_REPLICAS="3", AUTOVARUNA_NUM_MICRO_BATCHES="3")
    settings = resolve({"num_micro_batches": 4}, environ)
    assert (settings.num_stages, settings.num_replicas, settings.num_micro_batches) == (2, 3, 4)
    assert settings.source_of("num_stages") == f"{tmp_path / 'conf.toml'}: num_stages"
    assert settings.source_of("num_replicas") == "variable AUTOVARUNA_NUM_REPLICAS"
    assert settings.source_of("num_micro_batches") == "keyword num_micro_batches"
    by_alias = resolve({"nstages": 4}, conf("num_stages = 2", AUTOVARUNA_PARTITION_NUM="3"))
    assert (by_alias.num_stages, by_alias.source_of("num_stages")) == (4, "keyword nstages")


def test_the_environment_is_read_when_called(monkeypatch, conf):
    for name, value in conf("", AUTOVARUNA_NUM_STAGES="3").items():
        monkeypatch.setenv(name, value)
    assert resolve().num_stages == 3
    monkeypatch.setenv("AUTOVARUNA_NUM_STAGES", "4")
    assert resolve().num_stages == 4


@pytest.mark.parametrize(
    ("alias", "given", "name", "value"),
    [
        ("partition_num", 3, "num_stages", 3),
        ("replica_num", 3, "num_replicas", 3),
        ("pipeline_num", 3, "num_micro_batches", 3),
        ("chunk_size", 3, "micro_batch_size", 3),
        ("min_pipeline", 3, "min_micro_batches", 3),
        ("max_pipeline", 3, "max_micro_batches", 3),
        ("mem_limit_gb", 0.5, "memory_limit_bytes", 2**29),
        ("mem_margin", 0.2, "memory_margin", 0.2),
        ("opt_param_factor", 2, "optimizer_bytes_factor", 2.0),
        ("checkpointing", True, "recompute", "all"),
        ("checkpointing", False, "recompute", "none"),
        ("profiling_iter", 3, "profile_iterations", 3),
        ("event_trace_file", "x.json", "trace_events_file", "x.json"),
        ("dump_graph_prefix", "x", "dump_graph", "x"),
        ("show_config_items", True, "show_settings", True),
        ("stage_to_rank_map", {0: [0, 1], 1: [2]}, "stage_ranks", ((0, 1), (2,))),
    ],
)
def test_seed_names_are_aliases(alias, given, name, value):
    assert getattr(resolve({alias: given}, {"HOME": "/"}), name) == value


def test_bytes_and_lists_in_every_source(conf):
    for given, value in {1000: 1000, "2GiB": 2**31, "500MB": 5 * 10**8, "1.5 kib": 1536, "64": 64}.items():
        assert resolve({"memory_limit_bytes": given}, conf()).memory_limit_bytes == value
        assert resolve({}, conf("", AUTOVARUNA_MEMORY_LIMIT_BYTES=str(given))).memory_limit_bytes == value
    text = 'cuts = ["a", "b"]\nstage_ranks = [[0, 1], [2], [3]]'
    variables = {"AUTOVARUNA_CUTS": "a,b", "AUTOVARUNA_STAGE_RANKS": "[[0, 1], [2], [3]]"}
    for settings in (resolve({}, conf(text)), resolve({}, conf("", **variables)), resolve(tomli.loads(text), conf())):
        assert settings.cuts == ("a", "b")
        assert settings.stage_ranks == ((0, 1), (2,), (3,))


def test_a_path_may_be_a_path_and_a_function_comes_as_a_keyword_alone(conf):
    assert resolve({"deployment_file": Path("a") / "b.json"}, conf()).deployment_file == "a/b.json"
    assert resolve({"micro_batch_weight": len}, conf()).micro_batch_weight is len
    assert "expected a function" in refused(environ=conf("", AUTOVARUNA_MICRO_BATCH_WEIGHT="len"))


@pytest.mark.parametrize(("name", "nearest"), [("num_stage", "num_stages"), ("partition_nun", "partition_num")])
def test_an_unknown_name_names_place_and_nearest(conf, tmp_path, name, nearest):
    for message, place in [
        (refused({name: 1}, conf()), f"keyword {name}"),
        (refused(environ=conf(f"{name} = 1")), f"{tmp_path / 'conf.toml'}: {name}"),
        (refused(environ=conf("", **{f"AUTOVARUNA_{name.upper()}": "1"})), f"variable AUTOVARUNA_{name.upper()}"),
    ]:
        assert place in message
        assert f"did you mean {nearest}?" in message


@pytest.mark.parametrize("name", sorted(named_settings()))
def test_a_wrong_type_is_refused_and_says_what_is_expected(conf, name):
    _, kind = named_settings()[name]
    takes_text = "text" in kind.expected or "a path" in kind.expected
    for value in [object(), 3.5j] + ([] if takes_text else [f"not {kind.expected}"]):
        message = refused({name: value}, conf())
        assert f"keyword {name} is {value!r}; expected {kind.expected}" in message


ALMOST_RIGHT = {
    "num_stages": [True, -1, 2.0, "2"],
    "memory_margin": [1.0, float("nan")],
    "memory_limit_bytes": ["2 gigs", -1],
    "save_deployment": [2, "on"],
    "profile_iterations": [0],
    "cuts": ["a,b", [1]],
    "stage_ranks": [[0, 1], {1: [0]}, [[-1]]],
    "recompute": [True],
}


def test_almost_right_values_are_refused_and_named_by_file_and_variable(conf, tmp_path):
    for name, values in ALMOST_RIGHT.items():
        for value in values:
            assert f"keyword {name}" in refused({name: value}, conf())
    assert f"{tmp_path / 'conf.toml'}: num_stages is 'two'" in refused(environ=conf('num_stages = "two"'))
    assert "variable AUTOVARUNA_NUM_STAGES is 'two'" in refused(environ=conf("", AUTOVARUNA_NUM_STAGES="two"))


@pytest.mark.parametrize("content", [b"num_stages = 2\nnum_replicas = = 2", b'cuts = []\ndevice = "\xff"'])
def test_a_broken_file_is_named_with_its_line(conf, tmp_path, content):
    environ = conf()
    (tmp_path / "conf.toml").write_bytes(content)
    message = refused(environ=environ)
    assert str(tmp_path / "conf.toml") in message and "line 2" in message


def test_a_missing_directory_is_made(tmp_path):
    assert resolve({}, {"AUTOVARUNA_CONF_DIR": str(tmp_path / "not" / "there")}) == Settings()
    assert (tmp_path / "not" / "there").is_dir()
    (tmp_path / "file").touch()
    for named in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"AUTOVARUNA_CONF_DIR={named} is no directory" in refused(environ={"AUTOVARUNA_CONF_DIR": str(named)})


def test_a_name_and_its_alias_in_one_source_are_refused(conf):
    for message in (
        refused({"num_stages": 2, "nstages": 2}, conf()),
        refused(environ=conf("num_stages = 2\nnstages = 2")),
        refused(environ=conf("", AUTOVARUNA_NUM_STAGES="2", AUTOVARUNA_NSTAGES="2")),
    ):
        assert "num_stages" in message.lower()
        assert "same setting" in message


@pytest.mark.parametrize(
    "keywords",
    [
        {"num_micro_batches": 4, "micro_batch_size": 2},
        {"min_micro_batches": 8, "max_micro_batches": 4},
        {"num_stages": 2, "cuts": ["a", "b"]},
        {"num_stages": 2, "stage_ranks": [[0]]},
    ],
)
def test_settings_that_contradict_each_other_are_refused(conf, keywords):
    message = refused(keywords, conf())
    assert all(f"(keyword {name})" in message for name in keywords)


def test_settings_are_logged_with_their_sources(caplog, conf):
    with caplog.at_level("INFO", "autovaruna.config.settings"):
        log_settings(resolve({"num_stages": 3}, conf()))
    assert "num_stages = 3 (keyword num_stages)" in caplog.messages
    assert len(caplog.messages) == len(NAMES)


def test_conf_toml_has_every_setting_its_default_its_meaning_and_aliases():
    text, words = (CONF / "conf.toml").read_text(), meanings()
    assert list(tomli.loads(text)) == [name for name in NAMES if name not in KEYWORD_ONLY]
    assert resolve({}, {"AUTOVARUNA_CONF_DIR": str(CONF)}) == Settings()
    text = text.replace("\n#", "")
    for each in declarations():
        aliases = ", ".join(each.metadata["aliases"])
        assert words[each.name].endswith(".")
        assert words[each.name] + (f" Also: {aliases}." if aliases else "") in text


def test_the_example_run_settings_can_be_used():
    for path in CONF.glob("*/conf.toml"):
        assert resolve({}, {"AUTOVARUNA_CONF_DIR": str(path.parent)}) != Settings()


def test_every_setting_is_read_by_a_room():
    """As ``settings.<name>`` or ``self._settings.<name>``."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name not in ("config.py", "settings.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    reads = [node for node in nodes if isinstance(node, ast.Attribute)]
    read = {node.attr for node in reads if ast.unparse(node.value).split(".")[-1].lstrip("_") == "settings"}
    left_to_the_planner = {each.name for each in fields(Constraints)}  # read by these names
    assert not set(NAMES) - read - left_to_the_planner


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, a container whose user the system does not know got a bare ``RuntimeError``."""

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(ConfigError, match=r"no home directory.*Set HOME, or set AUTOVARUNA_CONF_DIR"):
        resolve({}, {})
