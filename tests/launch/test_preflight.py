"""The first sum over all devices, who is named when it does not end, and Gloo's lines.

The sum is compiled and run, in this process: it is what is tested.
"""

import threading
from types import SimpleNamespace

import jax
import pytest
from processes import finish, free_port, start
from refusals import refused
from test_hub import Joined, make  # noqa: F401

from fsdp_jax import processes
from fsdp_jax.errors import ProcessLostError
from fsdp_jax.launch import NativeOutput, hub, preflight, watch

pytestmark = pytest.mark.releases


class Comparing:
    def __init__(self):
        self.calls = []

    def require_same(self, what, facts, patience=None, following=None):
        self.calls.append((what, following))
        return True


def test_each_process_computes_alone_and_then_all_together(monkeypatch):
    comparing = Comparing()
    preflight.first_sum(comparing, 300)
    preflight.first_sum(comparing, 1)
    limits = [following for _, following in comparing.calls if following]
    assert limits == [(preflight.SUM, 300), (preflight.SUM, preflight.LEAST_SECONDS)]
    assert [what for what, _ in comparing.calls] == [preflight.START, preflight.SUM] * 2
    monkeypatch.setattr(preflight, "jnp", SimpleNamespace(sum=lambda x: x.sum() - 1))
    with refused(error=ProcessLostError, expected="8", got="7"):
        preflight.first_sum(comparing, 300)


@pytest.mark.parametrize(
    ("answering", "told"),
    [
        ([0], ["error: process 1 did not answer in time", "the first sum", "process 1 (host "]),
        ([], ["error: processes 0, 1 did not answer in time", "all of them wait", "loopback"]),
    ],
)
def test_who_does_not_answer_is_named(answering, told, make, monkeypatch, capfd):  # noqa: F811
    monkeypatch.setattr(hub, "SAY_SECONDS", 0.05)
    monkeypatch.setattr(watch, "GRACE", 0.1)
    port = free_port()
    both = [make(Joined, port, number) for number in range(2)]
    for each in both:
        assert each.wait().startswith("127.0.0.1:")
        assert each.watch.hosts == both[0].watch.hosts
    assert len(both[0].watch.hosts[0]) > 0

    def agree(each, what, following):
        threading.Thread(
            target=each.watch.require_same, args=[what, {}, None, following], daemon=True
        ).start()

    for each in both:
        agree(each, "the start", ("the first sum", 0.5))
    for number in answering:
        assert both[number].watch._agreed.wait(30)
        agree(both[number], "the first sum", None)
    for each in both:
        assert each.watch.ended.wait(30)
        assert each.watch.code == 69
    shown = capfd.readouterr().err
    for text in told:
        assert text in shown


def test_devices_of_a_host_are_known_as_such(monkeypatch):
    devices = [SimpleNamespace(process_index=process) for process in (0, 1, 2, 2, 3)]
    assert [processes.host_of(device) for device in devices] == [0, 1, 2, 2, 3]
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(processes, "_hosts", ["node1", "node1", "node2"])
    assert [processes.host_of(device) for device in devices] == [0, 0, 2, 2, 3]  # 3: planned for


NATIVE = """
import os, pathlib, sys
from fsdp_jax.launch import NativeOutput
with NativeOutput() as native:
    print("python, before")
    native.redirect()
    os.write(1, b"[Gloo] held\\n")
    print("python")
    native.keep(pathlib.Path(sys.argv[1]))
    os.write(1, b"[Gloo] kept\\n")
    print("python, after")
os.write(1, b"native, after\\n")
print("end")
"""


def test_what_cpp_prints_is_kept_in_a_file(tmp_path):
    file = tmp_path / "process-0.log"
    file.write_text("an earlier start\n")
    ((out, _),) = finish(start(NATIVE, file))
    assert sorted(out.splitlines()) == [
        "end", "native, after", "python", "python, after", "python, before",
    ]  # fmt: skip
    assert file.read_text() == "an earlier start\n[Gloo] held\n[Gloo] kept\n"


def test_a_stdout_that_is_no_file_is_left_alone(tmp_path, capsys):
    with NativeOutput() as native:
        native.redirect()
        native.keep(tmp_path / "process-0.log")
        print("shown")
    assert capsys.readouterr().out == "shown\n"
    assert not (tmp_path / "process-0.log").exists()
