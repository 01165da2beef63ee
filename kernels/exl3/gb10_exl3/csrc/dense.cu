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

// One block of 256 threads per 128 x 128 weights. Element l + 32 i of a row or column is in lane l, register i: neither
// direction of the transform meets a bank twice.
__global__ void __launch_bounds__(256) dense_kernel(const __grid_constant__ DenseArgs args) {
    extern __shared__ float block[];  // [input][output], rows of 129
    constexpr int stride = kStrip + 1;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    dispatch(args.k2, args.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value;
        for (int r = 0; r < 8; ++r) {
            const long tile = (blockIdx.y * 8L + r) * (args.n / 16) + blockIdx.x * 8 + warp;
            uint32_t a[4];
            fragment<K2, CB>(reinterpret_cast<const uint32_t*>(args.trellis + tile * Rate<K2>::bytes), lane, a);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 v = __half22float2(halves(a[i]));
                float* at = block + (16 * r + 2 * (lane & 3) + 8 * (i >> 1)) * stride + 16 * warp + (lane >> 2) + 8 * (i & 1);
                at[0] = v.x, at[stride] = v.y;
            }
        }
    });
    __syncthreads();
    const bool rotate = args.suh != nullptr;
    if (rotate) {
        for (int c = warp; c < kStrip; c += 8) {
            float v[4];
            for (int i = 0; i < 4; ++i) v[i] = block[(lane + 32 * i) * stride + c];
            hadamard(v, lane);
            for (int i = 0; i < 4; ++i) block[(lane + 32 * i) * stride + c] = v[i];
        }
        __syncthreads();
    }
    for (int r = warp; r < kStrip; r += 8) {
        const long row = blockIdx.y * kStrip + r;
        float v[4];
        for (int i = 0; i < 4; ++i) v[i] = block[r * stride + lane + 32 * i];
        if (rotate) hadamard(v, lane);
        const float left = rotate ? __half2float(args.suh[row]) : 1.0f;
        for (int i = 0; i < 4; ++i) {
            const int column = blockIdx.x * kStrip + lane + 32 * i;
            if (rotate) v[i] *= left * __half2float(args.svh[column]);
            const long at = row * args.n + column;
            if (args.bf16) static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16(v[i]);
            else static_cast<half*>(args.out)[at] = __float2half(v[i]);
        }
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
    const cudaError_t error = cudaFuncSetAttribute(dense_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kDenseBytes);
    if (error != cudaSuccess) return error;
    dense_kernel<<<dim3(args->n / kStrip, args->k / kStrip), 256, kDenseBytes, stream>>>(*args);
    return cudaGetLastError();
}
extern "C" int engram_gather(const exl3::EngramArgs* args, cudaStream_t stream) {
    exl3::engram_kernel<<<(args->count + 7) / 8, 256, 0, stream>>>(*args);
    return cudaGetLastError();
}
