"""The process of a rank that is not the first: `python -m app.engine.ranks.follower RANK ADDRESS`, started by rank 0.

The first line of stdin is an EngineConfig, and stdin's end means that rank 0 is gone. Steps come through the socket.
The last line of stdout says why the process ends.
"""

import os
import sys
import tempfile
import traceback
from pathlib import Path

import zmq

from app import log
from app.engine.comm.comm import Meeting
from app.engine.errors import UnsupportedError, last_words
from app.engine.host_cores import use_own_cores
from app.engine.load.engine import Rank, build_runner
from app.engine.ranks.leader import STORE, leave_with_parent
from app.engine.ranks.runner import follow
from app.wire import decode_config


def main() -> None:
    rank, address = sys.argv[1:]
    config = decode_config(sys.stdin.readline())
    log.set_up("error", config.log_format)  # rank 0 has said the rest
    leave_with_parent()
    use_own_cores()
    folder = Path(address.removeprefix("ipc://")).parent
    tempfile.tempdir = str(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.connect(address)

    def receive(milliseconds: int | None) -> bytes | None:
        return socket.recv() if socket.poll(milliseconds) else None

    try:
        meeting = Meeting(int(rank), config.tensor_parallel_size, folder / STORE, config.distributed_timeout_seconds)
        follow(build_runner(config, meeting.rank, lambda backend: Rank(backend.join(meeting))), receive)
    except UnsupportedError as error:  # rank 0 refuses the same settings, and may be slower
        print(error, flush=True)
        os._exit(2)
    except Exception as error:
        traceback.print_exc()
        print(last_words(error).splitlines()[0], flush=True)
        # A slow end would let rank 0 blame the connection that closes first, and torch_npu would write to stdout.
        os._exit(1)


if __name__ == "__main__":
    main()
