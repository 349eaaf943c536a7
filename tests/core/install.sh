#!/bin/sh
# Install what runs the codec of an ARM here, on Debian and Ubuntu: a cross compiler and QEMU.
set -e
command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64-static > /dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/core: not on Debian as root, so the tests on an ARM are left out" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update || true
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -y --no-install-recommends \
    g++-aarch64-linux-gnu qemu-user-static > /dev/null ||
    echo "tests/core: the packages could not be had, so the tests on an ARM are left out" >&2
