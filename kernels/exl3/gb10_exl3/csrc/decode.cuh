// SPDX-License-Identifier: Apache-2.0
// Packed trellis words of one 16x16 tile -> the eight half-precision weights of a lane, in the order in which
// mma.m16n8k16 takes them. The format is described in ../format.py, which these functions follow bit for bit.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>

namespace exl3 {

enum Codebook : int { k3inst = 0, kMcg = 1, kMul1 = 2 };

// Rates are counted in half bits per weight (K2 = 2K), so that 1.5, 2.5 and 3.5 are numbers like the others.
template <int K2> struct Rate {
    static constexpr int low = K2 / 2, high = (K2 + 1) / 2;  // new bits of even and of odd ring positions
    static constexpr int words = 4 * K2;                     // 32-bit words of a tile
    static constexpr int bytes = 16 * K2;
    static constexpr int lane_bits = 4 * K2;                 // new bits of the eight positions of a lane
    // Bits between the end of position j's window and the end of the lane's last one.
    __host__ __device__ static constexpr int shift(int j) {
        int bits = 0;
        for (int i = j + 1; i < 8; ++i) bits += i & 1 ? high : low;
        return bits;
    }
};

// Sixteen bits of top:hi:lo, Shift from its lower end.
template <int Shift> __device__ __forceinline__ uint32_t window(uint32_t lo, uint32_t hi, uint32_t top) {
    if constexpr (Shift + 16 <= 32) return (lo >> Shift) & 0xffff;
    else if constexpr (Shift < 32) return __funnelshift_r(lo, hi, Shift) & 0xffff;
    else if constexpr (Shift + 16 <= 64) return (hi >> (Shift - 32)) & 0xffff;
    else return __funnelshift_r(hi, top, Shift - 32) & 0xffff;
}

// The 16-bit states of ring positions 8*lane .. 8*lane+7. A window ends with the position's own bits and begins in those
// of its predecessors; the ring wraps, so that lane 0 reads the end of the tile.
template <int K2> __device__ __forceinline__ void states(const uint32_t* tile, int lane, uint32_t s[8]) {
    using R = Rate<K2>;
    if constexpr (K2 == 8) {  // byte permutations take two windows of four bits apart for the price of one shift
        const uint32_t b = tile[lane], a = tile[(lane + 31) & 31];
        const uint32_t f = __byte_perm(b, a, 0x5432), b4 = b >> 4, f4 = f >> 4;
        s[7] = b & 0xffff, s[6] = b4 & 0xffff, s[5] = __byte_perm(b, 0, 0x4421), s[4] = __byte_perm(b4, 0, 0x4421);
        s[3] = f & 0xffff, s[2] = f4 & 0xffff, s[1] = __byte_perm(f, 0, 0x4421), s[0] = __byte_perm(f4, 0, 0x4421);
    } else if constexpr (K2 == 4) {
        const int w = lane >> 1;
        const uint32_t v = __funnelshift_r(tile[w], tile[(w + 15) & 15], lane & 1 ? 0 : 16);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            s[7 - q] = (v >> (2 * q)) & 0xffff;
            s[3 - q] = __byte_perm(v >> (2 * q), 0, 0x4421);
        }
    } else {
        const int end = R::lane_bits * (lane + 1) - 1, w = end >> 5, sh = 31 - (end & 31);
        const uint32_t w2 = tile[w], w1 = tile[w >= 1 ? w - 1 : w + R::words - 1];
        const uint32_t lo = __funnelshift_r(w2, w1, sh);
        uint32_t hi, top = 0;
        // sh goes up to 32 less the step by which the lanes' ends move modulo 32; past 64 bits a third word is needed.
        constexpr int step = R::lane_bits % 8 ? 4 : R::lane_bits % 16 ? 8 : R::lane_bits % 32 ? 16 : 32;
        if constexpr (32 - step + R::shift(0) + 16 <= 64) {
            hi = w1 >> sh;
        } else {
            const uint32_t w0 = tile[w >= 2 ? w - 2 : w + R::words - 2];
            hi = __funnelshift_r(w1, w0, sh), top = w0 >> sh;
        }
        s[7] = window<R::shift(7)>(lo, hi, top), s[6] = window<R::shift(6)>(lo, hi, top);
        s[5] = window<R::shift(5)>(lo, hi, top), s[4] = window<R::shift(4)>(lo, hi, top);
        s[3] = window<R::shift(3)>(lo, hi, top), s[2] = window<R::shift(2)>(lo, hi, top);
        s[1] = window<R::shift(1)>(lo, hi, top), s[0] = window<R::shift(0)>(lo, hi, top);
    }
}

__device__ __forceinline__ uint32_t bits(half2 h) { return *reinterpret_cast<uint32_t*>(&h); }
__device__ __forceinline__ half2 halves(uint32_t u) { return *reinterpret_cast<half2*>(&u); }

// Two states -> two weights, the first in the low half.
template <int CB> __device__ __forceinline__ uint32_t weights(uint32_t p, uint32_t q) {
    if constexpr (CB == kMul1) {
        p *= 0x83DCD12Du, q *= 0x83DCD12Du;
        const uint32_t u = __dp4a(p, 0x01010101u, 0x6400u), v = __dp4a(q, 0x01010101u, 0x6400u);
        return bits(__hfma2(halves(__byte_perm(u, v, 0x5410)), __half2half2(__ushort_as_half(0x1EEE)),
                            __half2half2(__ushort_as_half(0xC931))));
    } else {
        p = CB == kMcg ? p * 0xCBAC1FEDu : p * 89226354u + 64248484u;
        q = CB == kMcg ? q * 0xCBAC1FEDu : q * 89226354u + 64248484u;
        p = (p & 0x8FFF8FFFu) ^ 0x3B603B60u, q = (q & 0x8FFF8FFFu) ^ 0x3B603B60u;
        return bits(__hadd2(halves(__byte_perm(p, q, 0x5410)), halves(__byte_perm(p, q, 0x7632))));
    }
}

// The lane's part of the tile as the A operand of mma.m16n8k16 (rows are outputs, columns are inputs).
template <int K2, int CB> __device__ __forceinline__ void fragment(const uint32_t* tile, int lane, uint32_t a[4]) {
    uint32_t s[8];
    states<K2>(tile, lane, s);
    a[0] = weights<CB>(s[0], s[1]), a[1] = weights<CB>(s[4], s[5]);
    a[2] = weights<CB>(s[2], s[3]), a[3] = weights<CB>(s[6], s[7]);
}

// f(Rate as a constant, codebook as a constant) for the values of a tensor; half rates exist for mul1 only.
template <int V> struct Constant { static constexpr int value = V; };
template <class F> __device__ __forceinline__ void dispatch(int k2, int codebook, F&& f) {
#define EXL3_RATE(V)                                                          \
    case V:                                                                   \
        if (codebook == kMul1) f(Constant<V>{}, Constant<kMul1>{});           \
        else if constexpr (V % 2 == 0) {                                      \
            if (codebook == kMcg) f(Constant<V>{}, Constant<kMcg>{});         \
            else f(Constant<V>{}, Constant<k3inst>{});                        \
        }                                                                     \
        break;
    switch (k2) {
        EXL3_RATE(2) EXL3_RATE(3) EXL3_RATE(4) EXL3_RATE(5) EXL3_RATE(6) EXL3_RATE(7)
        EXL3_RATE(8) EXL3_RATE(10) EXL3_RATE(12) EXL3_RATE(14) EXL3_RATE(16)
    }
#undef EXL3_RATE
}

}  // namespace exl3
