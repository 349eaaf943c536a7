#!/bin/sh
# Install what tests/browser needs, on Debian: Chromium.
set -e
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" > /dev/null && exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/browser: not on Debian as root, so the tests in a browser are left out" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update || true
apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -y --no-install-recommends chromium > /dev/null ||
    echo "tests/browser: Chromium could not be had, so the tests in a browser are left out" >&2
