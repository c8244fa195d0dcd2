# A stand-in for quay.io/ascend/cann: its Python, its Python packages, its shell and its entrypoint, without CANN itself.
FROM python:3.11-slim-bookworm
SHELL ["/bin/bash", "-c"]
RUN python3 -m venv /usr/local/python3.11.15
ENV PATH=/usr/local/python3.11.15/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip install --no-cache-dir attrs cython numpy decorator sympy cffi pyyaml pathlib2 psutil protobuf==3.20 scipy \
      requests absl-py
RUN mkdir -p /usr/local/Ascend/ascend-toolkit \
 && printf 'export ASCEND_HOME_PATH=/usr/local/Ascend/ascend-toolkit/latest\nexport ASCEND_OPP_PATH="$ASCEND_HOME_PATH/opp"\n' \
      > /usr/local/Ascend/ascend-toolkit/set_env.sh
ENTRYPOINT ["/bin/bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec \"$@\"", "bash"]
