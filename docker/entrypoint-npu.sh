#!/bin/bash
# tini starts this script. It sets CANN's environment and becomes dflash-server, so signals reach the server.
cann=/usr/local/Ascend/ascend-toolkit/set_env.sh
driver=/usr/local/Ascend/driver/lib64

if [ ! -r "$cann" ]; then
  echo "error: $cann cannot be read: this image has no CANN toolkit" >&2
  exit 1
fi
# CANN's own entrypoint sources NNAL and AscendNPU-IR too. The server calls no operator of these.
load() { # in a function, because a sourced script would see the server's arguments as its own
  # shellcheck source=/dev/null
  source "$cann"
}
load
# The host's driver is mounted.
export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# jemalloc, as in vllm-ascend's image, unless LD_PRELOAD is given, empty or not. It ends programs on a host whose pages
# have another size than it was built for.
jemalloc=/usr/local/lib/libjemalloc.so.2
if [ -z "${LD_PRELOAD+given}" ] && [ -z "$(LD_PRELOAD=$jemalloc /bin/true 2>&1)" ]; then
  export LD_PRELOAD=$jemalloc
fi
if [ "$1" = python3 ]; then # python3 -m tools.report --device npu
  exec "$@"
fi
exec dflash-server "$@"
