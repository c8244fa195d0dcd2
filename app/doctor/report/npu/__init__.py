"""What `dflash-server npu-report` does on the device: `python -m app.doctor.report.npu SECTION DEVICE SKIP`.

Each section is a list of parts; `app.doctor.report` starts the process, and again behind a part that broke it. Checked
against torch_npu's schemas, meta kernels and host checks on CPU; not run on an Ascend device.
"""
