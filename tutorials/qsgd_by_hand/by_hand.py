"""Quantise eight numbers, and show every step on the way.

Run it: python by_hand.py
"""

import numpy as np
from qsgd import dequantise, levels, pack, quantise, scaled, unpack

BITS = 3


def main():
    x = np.array([0.30, -0.05, 0.80, 0.00, -0.61, 0.12, 0.02, -0.33], np.float32)
    a, norms = scaled(x, BITS, len(x), "max")
    codes, _ = quantise(x, BITS, np.random.default_rng(3), bucket_size=len(x))
    decoded = dequantise(codes, norms, BITS, len(x))
    print(f"{BITS} bits: {levels(BITS)} levels on each side of zero; norm {norms[0]:.2f}")
    print("element  s|x|/norm  rounds up with  code  decoded")
    for element, level, code, value in zip(x, abs(a[0]), codes[0], decoded, strict=True):
        up = level - np.floor(level)
        print(f"{element:7.2f}  {level:9.4f}  {up:14.4f}  {code:4}  {value:7.4f}")
    message = pack(codes, norms, BITS)
    back, _ = unpack(message, BITS, len(x), bucket_size=len(x))
    print(f"message: {message.hex(' ')}  ({len(message)} bytes, as float32 {x.nbytes})")
    print("unpacked codes are the same:", np.array_equal(back, codes))


if __name__ == "__main__":
    main()
