import jax
import pytest

from fsdp_jax.compat.compilation_cache import use_compilation_cache
from fsdp_jax.errors import ConfigError
from fsdp_jax.train import compiled_programs
from fsdp_jax.train.compiled_programs import keep_compiled_programs, programs_folder


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache(None)
    yield tmp_path
    use_compilation_cache(before)


def test_one_process_keeps_its_programs_in_the_users_cache(no_folder):
    told = keep_compiled_programs("auto", "NVIDIA H100 80GB HBM3")
    folder = no_folder / "fsdp_jax" / "programs" / "nvidia-h100-80gb-hbm3"
    assert str(folder) in told
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.is_dir()


@pytest.mark.parametrize(("keep", "kept"), [("auto", False), ("always", True)])
def test_several_processes_keep_them_only_where_asked(no_folder, monkeypatch, keep, kept):
    monkeypatch.setattr(compiled_programs.jax, "process_count", lambda: 2)
    keep_compiled_programs(keep, "cpu")
    assert (jax.config.jax_compilation_cache_dir is not None) == kept


def test_never_keeps_none_and_a_folder_of_the_environment_counts(no_folder):
    keep_compiled_programs("never", "cpu")
    assert jax.config.jax_compilation_cache_dir is None
    use_compilation_cache("elsewhere")
    assert "elsewhere" in keep_compiled_programs("never", "cpu")
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_programs_for_the_cpu_are_apart_by_host(monkeypatch):
    names = set()
    for host in ("a", "b"):
        monkeypatch.setattr(compiled_programs.platform, "node", lambda host=host: host)
        names.add(programs_folder("cpu").name)
    assert names == {"cpu-a", "cpu-b"}


def test_a_folder_that_cannot_be_made_is_an_error_with_the_keys(no_folder):
    (no_folder / "fsdp_jax").write_text("")
    with pytest.raises(ConfigError) as caught:
        keep_compiled_programs("auto", "cpu")
    assert "keep_programs" in str(caught.value)
