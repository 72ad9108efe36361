"""headstart's own CPU kernels (`cpu.cpp`, `rounded.cpp`), each beside the torch code that it equals to rounding.

They exist for two reasons. A row's result is the same to the last bit whatever else is in the forward, which makes
plain decoding and the verification of a tree agree in bfloat16. And a tile of weights is read once for all rows, so
that verifying eight rows costs little more than decoding one; library products are made for hundreds of rows.

They need an x86 processor with AVX-512 and a C++ compiler, and are compiled at first use. Without either, everything
runs on torch's own operations.

    build      compiles and loads the sources, and hands out kernels
    products   with weights in float32 or bfloat16; rounded: in 8 or 4 bits
    paths      attention of rows over their own paths
    layers     norms and gated MLPs of stock models; attention: their attention modules; decoder: whole layers
    trial      whether such a module computes what its kernel does
"""
