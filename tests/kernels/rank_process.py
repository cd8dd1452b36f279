"""One of two processes of `test_ranks`: it computes its part of a model, then waits for a rank that is gone."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.models import factory

from forerun.errors import RankLost
from forerun.kernels.ranks import GroupRanks, connect_ranks
from forerun.models.loader import load_model

LIMIT_S = 3.0
PROMPT = [5, 9, 40, 7, 71, 8, 33]


def main(rank: int, port: int, transport: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    ranks = connect_ranks(limit_s=60) if transport == "shared" else GroupRanks(limit_s=60)
    model = load_model(folder, factory.make_kernels(), ranks=ranks).model
    logits = factory.Runner(model, 16).span(PROMPT).logits
    ranks.close()
    ranks = connect_ranks(limit_s=LIMIT_S) if transport == "shared" else GroupRanks(limit_s=LIMIT_S)
    if rank == 1:
        print("ready", flush=True)
        time.sleep(60)
    begun = time.monotonic()
    try:
        ranks.gather(torch.zeros(2, 1))
    except RankLost as error:
        said = {"kind": type(ranks).__name__, "logits": logits.tolist(), "error": str(error)}
        print(json.dumps({**said, "waited_s": time.monotonic() - begun}), flush=True)
    os._exit(0)  # gloo would wait for the lost rank as it ends


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
