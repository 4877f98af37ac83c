"""Writes the checkpoint that `tests/checkpoint/test_import_dcp.py` imports, and what is in it.

    python tests/parity/fsdp2_checkpoint.py tests/checkpoint/fsdp2.tar.xz

Eight processes of PyTorch train a small model with FSDP2 and AdamW, and save by
torch.distributed.checkpoint; `expected.json` has all values, and the losses of the next steps.
"""

import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 8


def run(rank: int, folder: str) -> None:
    """Trains two steps, saves, and trains three more: what each process does."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(14, 21), torch.nn.Tanh(), torch.nn.Linear(21, 5, bias=False)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    x = (torch.arange(56 * 14, dtype=torch.float32) % 13 / 13).reshape(56, 14)
    y = (torch.arange(56 * 5, dtype=torch.float32) % 7 / 7).reshape(56, 5)

    def step() -> float:
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    step()
    params, state = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optim": state, "step": 2}, checkpoint_id=f"{folder}/checkpoint")
    expected = {name: value.full_tensor().tolist() for name, value in params.items()}
    for name, moments in state["state"].items():
        for what in ("exp_avg", "exp_avg_sq"):
            expected[f"{name}.{what}"] = moments[what].full_tensor().tolist()
    expected["losses"] = [step() for _ in range(3)]
    if rank == 0:
        Path(folder, "expected.json").write_text(json.dumps(expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder,), nprocs=RANKS)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            for name in ("checkpoint", "expected.json"):
                archive.add(f"{folder}/{name}", name)
