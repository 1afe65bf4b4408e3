#!/bin/sh
# Make .venv with everything the project needs. A no-op when nothing it depends on has changed.
# On a machine with a GPU: torch for CUDA, FlashInfer, and Mooncake's CUDA build, in the versions of the GPU image.
set -eu
cd "$(dirname "$0")/.."

gpu=""
if ls /dev/nvidia[0-9]* >/dev/null 2>&1 || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then gpu=yes; fi
gpu_lock=deploy/docker/cuda.lock

fingerprint=$({ cat requirements.lock pyproject.toml tools/setup.sh "$gpu_lock"; echo "$gpu"; } | sha256sum | cut -c1-16)
stamp=.venv/.set-up-$fingerprint
[ -f "$stamp" ] && exit 0

say() { printf '== %s\n' "$*"; }

missing=""
command -v g++ >/dev/null 2>&1 || missing="$missing g++"
include=$(python3 -c "import sysconfig; print(sysconfig.get_paths()['include'])")
[ -f "$include/Python.h" ] || missing="$missing python3-dev"
[ -f /usr/include/zmq.h ] || missing="$missing libzmq3-dev"             # bench.router's fake workers
[ -f /usr/include/msgpack.hpp ] || missing="$missing libmsgpack-cxx-dev"
for library in libibverbs1:libibverbs.so.1 libnuma1:libnuma.so.1 libcurl4:libcurl.so.4; do    # Mooncake's engine
    ldconfig -p 2>/dev/null | grep -q "${library#*:}" || missing="$missing ${library%:*}"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "system packages:$missing"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    else
        say "for full speed install:  sudo apt-get install$missing"
        say "without them plain torch kernels, an index in Python and the tcp transport take over, and bench.router does not run"
    fi
fi

say "virtual environment in .venv"
[ -x .venv/bin/python ] || python3 -m venv .venv

# torch first: a plain requirement would pull in gigabytes of CUDA wheels on a CPU machine.
torch=$(grep '^torch==' requirements.lock)
if [ -n "$gpu" ]; then
    if ! .venv/bin/python -c "import torch, sys; sys.exit(torch.version.cuda is None or torch.__version__.split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
        say "$torch for CUDA"
        .venv/bin/pip install "torch===${torch#torch==}" --no-compile    # three `=`: a build for CPUs, 2.13.0+cpu, is not it
    fi
elif ! .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
    say "$torch"
    if [ -z "${TORCH_INDEX:-}" ] || ! .venv/bin/pip install --retries 0 --timeout 15 --index-url "$TORCH_INDEX" "$torch" --no-compile; then
        say "no torch at TORCH_INDEX: taking it from the configured index"
        .venv/bin/pip install "$torch" --no-compile
    fi
fi

say "packages"
requirements=requirements.lock
if [ -n "$gpu" ]; then
    requirements=.venv/requirements-gpu.txt
    { grep -v '^mooncake-' requirements.lock; grep -E '^(accelerate|cuda-bindings|psutil|flashinfer-python|mooncake-)' "$gpu_lock"; } > "$requirements"
    # Both builds of Mooncake own the package `mooncake`.
    .venv/bin/pip uninstall -q -y mooncake-transfer-engine-non-cuda
fi
.venv/bin/pip install --disable-pip-version-check --no-compile -r "$requirements"
.venv/bin/pip install --disable-pip-version-check --no-deps --no-build-isolation -q -e .
# With all cores; pip would take one. What does not compile are templates in packages, which nobody imports.
.venv/bin/python -m compileall -qq -j 0 .venv/lib || :

say "CPU kernels"
.venv/bin/python -m engine.cpu.build || say "the kernels could not be built: plain torch takes over"

say "copies of KV pages"
.venv/bin/python -m kvcache.native.build || say "they could not be built: memcpy takes their place"

say "the index's page table"
.venv/bin/python -m router.index.native.build || say "it could not be built: the one in Python takes over"

rm -f .venv/.set-up-*
touch "$stamp"
say "ready"
