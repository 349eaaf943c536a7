#!/bin/sh
# Install what simulations of a topology need, on Debian and Ubuntu: a C++ compiler and SimGrid.
set -e
command -v g++ > /dev/null && [ -e /usr/include/simgrid/s4u.hpp ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/simgrid: not on Debian as root, so the tests with SimGrid are left out" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update || true
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -y --no-install-recommends g++ libsimgrid-dev \
    > /dev/null ||
    echo "tests/simgrid: the packages could not be had, so the tests with SimGrid are left out" >&2
