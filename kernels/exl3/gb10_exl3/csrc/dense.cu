// SPDX-License-Identifier: Apache-2.0
// Whole matrices to dense halves (what a library's matrix product takes for many rows), and Engram's fp8 rows to bf16.
#include "strip.cuh"
#include <cuda_fp8.h>

namespace exl3 {

struct DenseArgs {
    const uint8_t* trellis;
    const half *suh, *svh;  // null: stay in the rotated basis, bit for bit
    void* out;              // k x n
    int k, n, k2, codebook, bf16;
};

// H x H of +-1 for the 16 inputs or outputs of a tile, as the two B operands of an MMA: entry (i, j) is (-1)^popcount(i & j).
struct Tile16 {
    uint2 b[2];
    __device__ explicit Tile16(int lane) {
        const int row = 2 * (lane & 3), column = lane >> 2;
        uint32_t pair = 0;
        for (int i = 0; i < 2; ++i) pair |= (0x3C00u | (__popc((row + i) & column) & 1u) << 15) << (16 * i);
        b[0] = make_uint2(pair, pair), b[1] = make_uint2(pair, pair ^ 0x80008000u);  // rows and columns from 8 on
    }
};
// An 8 x 8 matrix of halves per register, turned: lanes 8i .. 8i+7 point at the rows of matrix i.
__device__ __forceinline__ void load_turned(uint32_t a[4], const half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}

// One block of eight warps per 128 x 128 weights. Warp w decodes tile column w and transforms it along the inputs; through
// shared memory, as halves, it gets tile row w and transforms that along the outputs. Sixteen points at a time are the tensor
// cores' work. The rounding in the middle is of the size of the one at the end.
__global__ void __launch_bounds__(kThreads, 2) dense_kernel(const __grid_constant__ DenseArgs args) {
    __shared__ __align__(16) half turned[kStrip][kStrip + 8];  // [output][input], padded so that no read meets a bank twice
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, pair = 2 * (lane & 3);
    const bool rotate = args.suh != nullptr;
    const Tile16 h(lane);
    if (rotate) prefetch_halves(args.svh + blockIdx.x * kStrip, kStrip), prefetch_halves(args.suh + blockIdx.y * kStrip, kStrip);
    uint32_t own[8][4];  // the warp's tiles: two halves each, of consecutive inputs
    dispatch(args.k2, args.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value, tile = Rate<K2>::bytes;
        uint8_t* packed = reinterpret_cast<uint8_t*>(turned) + warp * 8 * tile;  // the same memory, before
        const uint8_t* from = args.trellis + (blockIdx.y * 8L * (args.n / 16) + blockIdx.x * 8 + warp) * tile;
        for (int i = lane; i < 8 * K2; i += 32)
            copy16(static_cast<uint32_t>(__cvta_generic_to_shared(packed)) + 16 * i, from + static_cast<long>(i / K2) * (args.n / 16) * tile + i % K2 * 16);
        commit();
        wait<0>();
        __syncwarp();
        float v[8][8] = {};
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            fragment<K2, CB>(reinterpret_cast<const uint32_t*>(packed + t * tile), lane, own[t]);
            if (rotate) {
                mma(reinterpret_cast<float(&)[4]>(v[t][0]), own[t], h.b[0]);
                mma(reinterpret_cast<float(&)[4]>(v[t][4]), own[t], h.b[1]);
            }
        }
        if (!rotate) return;
        across<8, 8>(v);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) own[t][i] = bits(__floats2half2_rn(v[t][2 * i], v[t][2 * i + 1]));
    });
    __syncthreads();  // everybody has decoded
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint32_t*>(&turned[16 * warp + row + 8 * (i & 1)][16 * t + pair + 8 * (i >> 1)]) = own[t][i];
    __syncthreads();
    float v[8][8] = {};
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        uint32_t a[4];
        load_turned(a, &turned[16 * t + (lane & 7) + 8 * (lane >> 4)][16 * warp + (lane & 8)]);
        if (rotate) {
            mma(reinterpret_cast<float(&)[4]>(v[t][0]), a, h.b[0]);
            mma(reinterpret_cast<float(&)[4]>(v[t][4]), a, h.b[1]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 both = __half22float2(halves(a[i]));
                v[t][2 * i] = both.x, v[t][2 * i + 1] = both.y;
            }
        }
    }
    const long first_row = blockIdx.y * kStrip + 16 * warp + row, first_column = blockIdx.x * kStrip;
    if (rotate) {
        across<8, 8>(v);
        // 1/sqrt(128) of both transforms. Without it the halves in the middle stay below 128 times 4.
        const float left[2] = {__half2float(args.suh[first_row]) / 128, __half2float(args.suh[first_row + 8]) / 128};
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 right = __half22float2(*reinterpret_cast<const half2*>(args.svh + first_column + 16 * t + pair + 8 * (i >> 1)));
                v[t][2 * i] *= left[i & 1] * right.x, v[t][2 * i + 1] *= left[i & 1] * right.y;
            }
    }
    // Registers 2i, 2i+1: row + 8 (i & 1), columns pair + 8 (i >> 1). Neighbours trade so that each has four columns in a row.
    const bool odd = lane & 1;
    uint16_t* out = static_cast<uint16_t*>(args.out) + first_row * args.n + first_column + (odd ? 8 : 0) + 2 * (lane & 2);
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t low = pack2(v[t][2 * i], v[t][2 * i + 1], args.bf16), high = pack2(v[t][4 + 2 * i], v[t][5 + 2 * i], args.bf16);
            const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
            *reinterpret_cast<uint2*>(out + 8L * i * args.n + 16 * t) = odd ? make_uint2(got, high) : make_uint2(low, got);
        }
}

struct EngramArgs {
    const uint8_t *weight, *scale;  // [rows, width] e4m3fn; [rows, width/32] e8m0
    const int64_t* ids;
    __nv_bfloat16* out;             // [count, width]
    long count, rows, offset;       // row = id - offset; what is outside of [0, rows) is another rank's: zeros
    int width;
};

// One warp per row and step of 256 elements; a lane converts eight.
__global__ void __launch_bounds__(256) engram_kernel(const __grid_constant__ EngramArgs args) {
    const long i = blockIdx.x * 8L + (threadIdx.x >> 5);
    if (i >= args.count) return;
    const long row = args.ids[i] - args.offset;
    const bool mine = row >= 0 && row < args.rows;
    for (int e = 8 * (threadIdx.x & 31); e < args.width; e += 256) {
        union { uint4 word; __nv_bfloat16 value[8]; } out = {};
        if (mine) {
            union { uint2 word; uint8_t byte[8]; } in;
            in.word = __ldg(reinterpret_cast<const uint2*>(args.weight + row * args.width + e));
            const uint8_t s = args.scale[row * (args.width / 32) + e / 32];
            const float scale = s == 255 ? __int_as_float(0x7fffffff) : ldexpf(1.0f, s - 127);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                out.value[j] = __float2bfloat16(__half2float(half(__nv_cvt_fp8_to_halfraw(in.byte[j], __NV_E4M3))) * scale);
        }
        *reinterpret_cast<uint4*>(args.out + i * args.width + e) = out.word;
    }
}

}  // namespace exl3

extern "C" int exl3_dequant(const exl3::DenseArgs* args, cudaStream_t stream) {
    using namespace exl3;
    dense_kernel<<<dim3(args->n / kStrip, args->k / kStrip), kThreads, 0, stream>>>(*args);
    return cudaGetLastError();
}
extern "C" int engram_gather(const exl3::EngramArgs* args, cudaStream_t stream) {
    exl3::engram_kernel<<<(args->count + 7) / 8, 256, 0, stream>>>(*args);
    return cudaGetLastError();
}
