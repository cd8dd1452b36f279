"""One of two processes of `test_ranks`: it exchanges once, then again with a rank that is gone."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from forerun.errors import RankLost
from forerun.kernels.ranks import GroupRanks, connect_ranks

LIMIT_S = 3.0


def main(rank: int, port: int, transport: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    ranks = connect_ranks(limit_s=LIMIT_S) if transport == "shared" else GroupRanks(limit_s=LIMIT_S)
    widths = [1, 2]
    gathered = ranks.gather(torch.full((2, widths[rank]), float(rank)), widths)
    if rank == 1:
        print("ready", flush=True)
        time.sleep(60)
    begun = time.monotonic()
    try:
        ranks.gather(torch.zeros(2, 1), widths)
    except RankLost as error:
        said = {"kind": type(ranks).__name__, "gathered": gathered.tolist(), "error": str(error)}
        print(json.dumps({**said, "waited_s": time.monotonic() - begun}), flush=True)
    os._exit(0)  # gloo would wait for the lost rank as it ends


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
