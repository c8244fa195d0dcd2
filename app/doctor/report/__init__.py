"""`dflash-server npu-report`: starts the sections of `app.doctor.report.npu` one by one, and writes what they found.

Nothing leaves the host, and no prompt, user name or host name is written.
"""
