"""A follower without a model, which reads what rank 0 sends: `python -m tools.lab.rank_reader RANK ADDRESS`."""

import sys
import threading

import zmq

from app.engine.ranks.parent import leave_with_parent


def main() -> None:
    threading.Thread(target=leave_with_parent, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.connect(sys.argv[2])
    while True:
        socket.recv()


if __name__ == "__main__":
    main()
