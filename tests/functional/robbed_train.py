"""A training script that is robbed of a port: ``robbed_train.py TARGET FOLDER SETTINGS...``.

Before the job listens on the port for the first time another socket does: on a server's (``server``), on that
of torch's rendezvous (``rendezvous``), or on that of a trainer, which DGL chooses while it connects
(``trainer``). A file in the folder records it.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import dglkge
from dglkge.distributed.dgl_compat import dgl

target, folder, *settings = sys.argv[1:]
stolen: list[socket.socket] = []


def steal(address: str, port: int) -> None:
    """Listen on a port, once in the life of the job."""
    note = Path(folder, "stolen")
    if not note.exists():
        note.write_text(f"{address}:{port}", encoding="utf-8")
        stolen.append(socket.create_server((address, port)))


role, rank = os.environ["DGL_ROLE"], os.environ.get("RANK")
if target == "server" and role == "server":
    address, port = Path(os.environ["DGL_IP_CONFIG"]).read_text(encoding="utf-8").split()
    steal(address, int(port))
if target == "rendezvous" and rank == "0":
    steal(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if target == "trainer" and rank == "1":
    wait = dgl.distributed.rpc.wait_for_senders

    def robbed(address: str, port: str, *rest: object, **options: object) -> None:
        """Wait as DGL does, on a port that is in use already."""
        steal(address, int(port))
        wait(address, port, *rest, **options)

    dgl.distributed.rpc.wait_for_senders = robbed

config = dglkge.load_config(None, settings)
with dglkge.join_cluster(config) as cluster:
    trainer = dglkge.build_trainer(config, cluster)
    for _ in dglkge.remaining_epochs_until(config.training.num_epochs):
        for batch in trainer.batches():
            trainer.step(batch)
    trainer.commit()
