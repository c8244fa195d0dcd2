"""One step on the device: a batch as one record of arrays, its copy, the two forwards, and their graphs.

Which sequences run is in `schedule`, models are in `models` and `dflash`, operators in `device`, choices in `sampling`.
"""
