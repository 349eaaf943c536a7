#!/bin/sh
# Install what compiles the GPU kernels for AMD, on Debian: hipcc with its runtime's library, and a
# clang that knows newer GPUs than that hipcc does. No GPU is needed.
set -e
command -v hipcc > /dev/null && command -v clang++-19 > /dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/gpu: not on Debian as root, so the kernels are not compiled for AMD" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update || true
for packages in "hipcc libamdhip64-dev" "clang-19 clang-tools-19 lld-19"; do
    # shellcheck disable=SC2086 # words
    apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -y --no-install-recommends $packages \
        > /dev/null ||
        echo "tests/gpu: $packages could not be had, so a test of the kernels for AMD is left out" >&2
done
