"""Placements read from the environment of each scheduler, and the GPUs that follow from them."""

import http.server
import threading
from pathlib import Path

import pytest
from refusals import refused

from fsdp_jax.errors import ConfigError
from fsdp_jax.launch import cluster, join_cluster, schedulers
from fsdp_jax.launch.schedulers import ProcessPlacement, choose_gpus, find_placement
from fsdp_jax.launch.watch import Watch
from fsdp_jax.train.config import ClusterConfig
from fsdp_jax.train.typed_keys import field_comments

pytestmark = pytest.mark.releases

# As Slurm 22.05 and Open MPI 4.1 set them.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[001-002]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SLURM_BY_GPU = SLURM | {
    "SLURM_STEP_NUM_TASKS": "17",
    "SLURM_STEP_NODELIST": "rack[07-09,11]-gpu,other",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "744554496.0;tcp://192.0.2.2:52413;tcp6://[fd00::2]:42859",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1"}
TRAINER = {
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:29500",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
SLICE = {"TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3", "TPU_WORKER_ID": "2"}
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "s-0:8080",
}


PLACEMENTS = [
    ({}, None),
    (SLURM, ("Slurm", "gpu001", 2, 1)),
    (SLURM_BY_GPU, ("Slurm", "rack07-gpu", 17, 11)),
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None),
    (MPI, ("Open MPI", "192.0.2.2", 4, 3)),
    (MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2,fd00::3]:4"}, ("[fd00::2]",)),
    (
        MPI | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-login-1-4242@1"},
        ("login-1",),
    ),
    (TORCHRUN, ("torchrun", "10.0.0.1:29500", 4, 3)),
    (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, ("10.0.0.1:29501",)),
    (SKYPILOT, ("SkyPilot", "10.0.0.1", 2, 1)),
    (TRAINER, ("JAX_NUM_PROCESSES", "job-node-0-0.job:29500", 2, 1)),
    (SLICE, ("Cloud TPU", "t-0:8476", 4, 2)),
    (SLICE | SLICES, ("Cloud TPU", "s-0:8476", 8, 6)),
    ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    # what starts processes inside of another scheduler's job counts
    (SLURM | MPI, ("Open MPI",)),
    (SLURM | TORCHRUN | SKYPILOT, ("torchrun",)),
    (SLURM | MPI | TORCHRUN | TRAINER, ("JAX_NUM_PROCESSES",)),
    (SLURM | TRAINER | {"JAX_NUM_PROCESSES": "1"}, None),
    # jax's variables for the address alone
    (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib0:1234"}, ("Slurm", "ib0:1234")),
    (SLURM | {"JAX_COORDINATOR_PORT": "1234"}, ("Slurm", "gpu001:1234")),
]


def test_every_scheduler_is_read_and_documented():
    """Above, in `--help` and on the page."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    read = {expected[0] for _, expected in PLACEMENTS if expected is not None}
    for row in schedulers.SCHEDULERS:
        assert row.name in page, row.name
        if row.name != "Kubernetes":  # whose environment tells too little
            assert row.name in read
        if row.name not in ("Kubernetes", "JAX_NUM_PROCESSES"):
            assert row.name in field_comments(ClusterConfig)["detect"]


def test_placements():
    for environment, expected in PLACEMENTS:
        placement = find_placement(environment)
        if expected is None:
            assert placement is None, environment
            continue
        assert placement is not None, environment
        host = placement.coordinator.rpartition(":")[0]
        found = (placement.scheduler, placement.coordinator, host, *vars(placement).values())
        assert set(expected) <= set(found), environment
        numbers = expected[2:]
        assert tuple(vars(placement).values())[2 : 2 + len(numbers)] == numbers, environment


def test_a_port_is_derived_from_the_job():
    ports = set()
    for job in range(100, 200):
        both = [
            find_placement(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_PROCID": process})
            for process in "01"
        ]
        assert both[0].coordinator == both[1].coordinator
        ports.add(int(both[0].coordinator.rpartition(":")[2]))
    assert len(ports) > 90
    assert all(61440 <= port < 65535 and port % 2 == 0 for port in ports)


TELL_TOO_LITTLE = [
    (SLURM | {"SLURM_PROCID": "one"}, "SLURM_PROCID", "left from elsewhere"),
    (TORCHRUN | {"RANK": "4"}, "RANK", ""),
    # a part of jax's own variables
    ({"JAX_COORDINATOR_ADDRESS": "host:1"}, "JAX_NUM_PROCESSES", "left from elsewhere"),
    (SLURM | {"JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES", "left from elsewhere"),
    # the script that sbatch runs, with tasks or with nodes alone
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, "Slurm's job 7", "put `srun` before"),
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "Slurm's job 7", "put `srun` before"),
    (
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
        "JOB_COMPLETION_INDEX",
        "clusters.md",
    ),
    (
        {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        "JAX_COORDINATOR_ADDRESS",
        "for every process",
    ),
]


def test_what_does_not_tell_enough_is_refused():
    for environment, where, fix in TELL_TOO_LITTLE:
        with refused(error=ConfigError, where=where, fix=fix):
            find_placement(environment)


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata server of a TPU VM: host 1 of 4 of the second slice."""

    VALUES = {  # noqa: RUF012
        "agent-worker-number": "1",
        "worker-network-endpoints": "a:1:10.0.0.5,b:2:10.0.0.6,c:3:10.0.0.7,d:4:10.0.0.8",
        "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
        "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'\n",
    }

    def do_GET(self):
        assert self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.VALUES[self.path.rpartition("/")[2]].encode())

    def log_message(self, *_):
        pass


def test_a_tpu_vm_asks_its_metadata_server(monkeypatch):
    monkeypatch.setattr(schedulers, "has_tpus", lambda: True)
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        placement = find_placement(where)
        server.shutdown()
    assert placement == ProcessPlacement("Cloud TPU", "10.0.0.1:8476", 8, 5)
    assert find_placement(where) is None  # nothing listens there now


BINDS = ProcessPlacement("Slurm", "host:1", 16, 11, binds_gpus=True)


SHARED_GPUS = [
    ([11], 8, list(range(8))),  # jax's own detection takes GPU 0 alone
    ([8, 9, 10, 11, 12, 13, 14, 15], 8, [3]),
    ([8, 11], 8, [4, 5, 6, 7]),
    ([2, 11, 12, 15], 8, [2, 3]),  # numbers that alternate between hosts
    ([8, 11], 1, [0]),  # each is shown its own GPU only
    ([8, 11], 0, None),
]


def test_every_gpu_of_a_host_is_one_processs():
    for sharers, visible, gpus in SHARED_GPUS:
        assert choose_gpus(None, {}, visible, 11, sharers) == gpus, sharers
        assert choose_gpus(None, {"JAX_LOCAL_DEVICE_IDS": "0"}, visible, 11, sharers) is None


def test_gpus_that_are_bound_to_a_process_are_not_shared():
    assert choose_gpus(BINDS, {}, 2, 11, [10, 11]) == [0, 1]
    bound = {"CUDA_VISIBLE_DEVICES": "0,1"}  # of eight: a container numbers its own from 0
    assert choose_gpus(None, bound, 2, 11, list(range(8, 16))) == [0, 1]


def test_gpus_that_cannot_be_shared_equally_are_refused():
    for visible, processes in ((3, 2), (8, 16)):
        with refused(error=ConfigError, where="this host", got=f"{visible} GPUs"):
            choose_gpus(None, {}, visible, 0, list(range(processes)))


# Joining


@pytest.fixture
def joined(monkeypatch):
    """Sets the environment, and notes what `join_cluster` passes on, without a connection."""
    calls = {}

    class Joined(Watch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            calls["watch"] = arguments

        def join(self, facts, following, gpus):
            self.hosts = calls["hosts"] or [str(k) for k in range(self._processes)]
            self.gpus = [len(gpus)] * len(self.hosts)
            return "host:2"

    def initialize(*arguments, **settings):
        calls["jax"] = (*arguments, settings)

    monkeypatch.setattr(cluster, "Watch", Joined)
    monkeypatch.setattr(cluster, "_watch", None)
    monkeypatch.setattr(cluster, "_install_exit_hooks", lambda: None)
    monkeypatch.setattr(cluster, "compare_facts_by", lambda by: None)
    monkeypatch.setattr(cluster, "set_hosts", lambda hosts: None)
    monkeypatch.setattr(cluster, "first_sum", lambda watch, seconds: None)
    monkeypatch.setattr(cluster, "list_gpus", lambda environment: ["gpu"] * 8)
    monkeypatch.setattr(cluster.jax.distributed, "initialize", initialize)

    def join(environment, *arguments, hosts=(), **settings):
        calls.clear()
        calls["hosts"] = hosts
        monkeypatch.setattr(cluster, "_watch", None)
        monkeypatch.setattr(cluster.os, "environ", environment)
        join_cluster(*arguments, **settings)
        return calls

    return join


def test_one_task_per_node_of_slurm_takes_all_gpus_of_its_node(joined):
    calls = joined(SLURM)
    assert calls["jax"][:3] == ("host:2", 2, 1)
    settings = calls["jax"][3]
    assert settings["local_device_ids"] == list(range(8))
    assert settings["cluster_detection_method"] == "deactivate"


def test_processes_of_one_host_share_its_gpus(joined):
    def share(*arguments, **settings):
        return joined(*arguments, **settings)["jax"][3]["local_device_ids"]

    hosts = "a" * 8 + "b" * 8 + "c"
    assert share(SLURM_BY_GPU, hosts=hosts) == [3]
    assert share(SLURM_BY_GPU | {"SLURM_GPUS_PER_TASK": "8"}, hosts=hosts) == list(range(8))
    assert share(TORCHRUN, hosts="aabb") == [4, 5, 6, 7]
    assert share({}, "host:1", 4, 3, hosts="aabb") == [4, 5, 6, 7]


def test_what_is_given_counts_and_the_rest_is_detected(joined):
    assert joined(SLURM, "10.0.0.9:99")["watch"][:4] == ("10.0.0.9", 99, 1, 2)
    calls = joined(SLURM_BY_GPU, "10.0.0.9:99", 3, 2)
    assert calls["watch"][:4] == ("10.0.0.9", 99, 2, 3)
    # as from a shell in a job, where the scheduler alone would not do
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    assert joined(batch, "10.0.0.9:99", 3, 2)["watch"][:4] == ("10.0.0.9", 99, 2, 3)
    for arguments in [(), ("10.0.0.9:99",), ("10.0.0.9:99", 1, 0)]:
        with refused("srun has not started it", error=ConfigError):
            joined(batch, *arguments)
    assert "watch" not in joined(SLURM, detect=False) | joined({})


def test_a_run_of_one_of_several_started_processes_is_refused(joined):
    with refused("Slurm has started 2", error=ConfigError, fix="detect false"):
        joined(SLURM, "host:1", 1, 0)
    assert joined(SLURM, "host:1", 1, 0, detect=False)["watch"][:4] == ("host", 1, 0, 1)


def test_a_scheduler_that_does_not_tell_the_address_asks_for_it(joined):
    environment = {name: value for name, value in MPI.items() if "uri" not in name}
    with refused(error=ConfigError, fix="Open MPI does not tell where process 0 is"):
        joined(environment)
    assert joined(environment, "host:1")["watch"][:4] == ("host", 1, 3, 4)
