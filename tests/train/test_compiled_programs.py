from dataclasses import replace

import jax
import pytest
from refusals import refused

from fsdp_jax.compat.compilation_cache import use_compilation_cache
from fsdp_jax.errors import ConfigError
from fsdp_jax.train import compile_ahead, compiled_programs
from fsdp_jax.train.compile_ahead import Ahead
from fsdp_jax.train.compiled_programs import (
    keep_compiled_programs,
    keys_of_the_step,
    programs_folder,
)
from fsdp_jax.train.config import Config, TrainConfig
from fsdp_jax.train.config_file import key_values


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache(None)
    yield tmp_path
    use_compilation_cache(before)


def keep(kind="cpu", output="output/run", **settings):
    return keep_compiled_programs(TrainConfig(**settings), str(output), key_values(Config()), kind)


def test_one_process_keeps_its_programs_in_the_users_cache(no_folder):
    programs = keep("NVIDIA H100 80GB HBM3")
    folder = no_folder / "fsdp_jax" / "programs" / "nvidia-h100-80gb-hbm3"
    assert str(folder) in programs.text
    assert programs.kept is None
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.is_dir()


@pytest.mark.parametrize(("setting", "kept"), [("auto", True), ("always", True), ("never", False)])
def test_several_processes_keep_them_in_the_directory_of_the_run(
    no_folder, monkeypatch, tmp_path, setting, kept
):
    monkeypatch.setattr(compiled_programs.jax, "process_count", lambda: 2)
    programs = keep(output=tmp_path, keep_programs=setting)
    assert jax.config.jax_compilation_cache_dir is None
    assert (programs.kept is not None) == kept
    if programs.kept is not None:
        assert (programs.kept.directory, programs.kept.use) == (tmp_path / "programs", "keep")


def test_several_processes_keep_none_where_jax_is_told_to_keep_none(no_folder, monkeypatch):
    monkeypatch.setattr(compiled_programs.jax, "process_count", lambda: 2)
    monkeypatch.setattr(compiled_programs, "cache_is_enabled", lambda: False)
    assert keep().kept is None


def test_never_keeps_none_and_a_folder_of_the_environment_counts(no_folder):
    assert keep(keep_programs="never").kept is None
    assert jax.config.jax_compilation_cache_dir is None
    use_compilation_cache("elsewhere")
    assert "elsewhere" in keep(keep_programs="never").text
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_stated_programs_are_required_from_the_start(no_folder):
    use_compilation_cache("elsewhere")
    with refused("no compiled program", error=ConfigError, where=str(no_folder)):
        keep(programs=str(no_folder))
    folder = no_folder / "processes-1"
    folder.mkdir()
    (folder / f"train-step-{'0' * 16}.program").write_text("")
    programs = keep(programs=str(no_folder))
    assert programs.kept is not None
    assert programs.kept.use == "require"


def test_keys_that_change_no_program_are_in_no_header():
    keys = keys_of_the_step(key_values(Config()))
    assert {"model.layers", "train.global_batch_size", "strategy"} <= keys.keys()
    assert {"model.weights", "data.tokenizer", "data.path"} <= keys.keys(), "they have sizes"
    left_out = {"output", "train.programs", "train.log_every", "checkpoint.every", "track.kind"}
    assert left_out.isdisjoint(keys)


def test_programs_for_the_cpu_are_apart_by_host(monkeypatch):
    names = set()
    for host in ("a", "b"):
        monkeypatch.setattr(compiled_programs.platform, "node", lambda host=host: host)
        names.add(programs_folder("cpu").name)
    assert names == {"cpu-a", "cpu-b"}


def test_a_folder_that_cannot_be_made_is_an_error_with_the_keys(no_folder):
    (no_folder / "fsdp_jax").write_text("")
    with pytest.raises(ConfigError) as caught:
        keep()
    assert "keep_programs" in str(caught.value)


def test_processes_that_compile_are_started_as_those_of_a_run(monkeypatch, tmp_path):
    """A number of devices that nobody stated would set flags of XLA that `train` has not."""
    started = []
    monkeypatch.setattr(compile_ahead, "launch", lambda options: started.append(options) or 1)
    for devices in (None, 2):
        Ahead(Config(), tmp_path, print).compile_in_processes(["CONFIG"], 2, devices)
    assert [options.devices_per_process for options in started] == [None, 2]


def test_programs_are_made_for_the_numbers_with_which_a_run_may_go_on(monkeypatch, tmp_path):
    """Of four processes: three, and two, with which the launcher goes on. 32 rows refuse three."""
    started = []
    monkeypatch.setattr(
        compile_ahead, "launch", lambda options: started.append(options.processes) or 0
    )
    config = replace(Config(), train=replace(Config().train, global_batch_size=32))
    _, found = Ahead(config, tmp_path, print).compile_in_processes(["CONFIG"], 4, 1)
    assert started == [4, 2]
    assert "not for 3 processes" in found.left_out[0]
    with pytest.raises(ConfigError, match="global_batch_size"):
        Ahead(config, tmp_path, print).compile_in_processes(["CONFIG"], 3, 1)
    assert started == [4, 2]
