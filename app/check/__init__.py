"""`dflash-server check`: can the server run on this host and device, and are the device's operators right?

`operators.py` is the conformance suite of every device folder. Probes of a kind of host are in that device's folder
(`app/engine/*/host_probes.py`). What takes times and writes pages is in `tools/report`.
"""
