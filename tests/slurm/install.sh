#!/bin/sh
# Install what tests/slurm needs, on Debian and Ubuntu: Slurm, MUNGE, and a database for accounting.
set -e
command -v slurmctld slurmdbd munged mariadbd > /dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/slurm: not on Debian as root, so the tests on a real Slurm are left out" >&2
    exit 0
fi
# At run level 1 the packages start no service: the tests start their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update || true
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -y --no-install-recommends \
    slurm-wlm slurmdbd munge mariadb-server > /dev/null ||
    echo "tests/slurm: the packages could not be had, so the tests on a real Slurm are left out" >&2
