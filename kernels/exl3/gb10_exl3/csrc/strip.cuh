// SPDX-License-Identifier: Apache-2.0
// The inner product that linear and MoE share: a block multiplies rotated activation rows by a strip of 128 outputs.
//
// Warp c of a group of eight owns tile column c of the strip. It streams its own tiles through its own ring in shared
// memory, so that weights need no barrier between warps; only the rotated activations, which all share, do.
// Weights are the A operand (16 outputs x 16 inputs), activations the B operand (8 rows): a tile costs one MMA per eight
// rows, and the accumulator holds outputs (lane>>2), +8 and rows 2*(lane&3), +1.
#pragma once
#include "decode.cuh"
#include <cooperative_groups.h>
#include <cuda_bf16.h>

namespace exl3 {

namespace cg = cooperative_groups;
constexpr int kStrip = 128;       // outputs of a strip and inputs of a block of k: the size of the rotation
constexpr int kRowHalves = 144;   // a row of 128 rotated halves and 16 of padding: fragment reads meet no bank twice
constexpr int kSumRow = 132;      // a row of 128 sums, padded for the same reason
constexpr int kRingBytes = 4096;  // of one warp: two stages of eight tiles at 8 bits, five at 3

__device__ __forceinline__ void store4(void* p, long i, bool bf16, const float v[4]) {
    uint2 word;
    if (bf16) {
        __nv_bfloat162 a = __floats2bfloat162_rn(v[0], v[1]), b = __floats2bfloat162_rn(v[2], v[3]);
        word = {*reinterpret_cast<uint32_t*>(&a), *reinterpret_cast<uint32_t*>(&b)};
    } else {
        word = {bits(__floats2half2_rn(v[0], v[1])), bits(__floats2half2_rn(v[2], v[3]))};
    }
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p) + i) = word;
}
// Four consecutive 16-bit values, raw: loaded early, converted where they are used.
__device__ __forceinline__ uint2 raw4(const void* p, long i) {
    return __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + i));
}
__device__ __forceinline__ void unpack4(uint2 r, bool bf16, float v[4]) {
    const uint32_t w[2] = {r.x, r.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (bf16) {
            v[2 * i] = __uint_as_float(w[i] << 16), v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        } else {
            const float2 f = __half22float2(halves(w[i]));
            v[2 * i] = f.x, v[2 * i + 1] = f.y;
        }
    }
}

// 128-point transform over a warp, lane l holding elements 4l .. 4l+3, in natural order, times 1/sqrt(128).
__device__ __forceinline__ void hadamard(float v[4], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], bit);
            v[i] = lane & bit ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= 0.08838834764831845f;
}

// Sixteen consecutive values, converted.
__device__ __forceinline__ void load16(const uint16_t* p, bool bf16, float v[16]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 r = *reinterpret_cast<const uint4*>(p + 8 * i);
        unpack4({r.x, r.y}, bf16, v + 8 * i);
        unpack4({r.z, r.w}, bf16, v + 8 * i + 4);
    }
}
// The values of a 16-wide step, as halves, in the order in which a lane of the MMA finds its four in one 8-byte read: pairs
// 0 4 1 5 2 6 3 7.
__device__ __forceinline__ void store_step(half* step, const float v[16]) {
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[(i & 3) * 2 + (i >> 2)] = bits(__floats2half2_rn(v[2 * i], v[2 * i + 1]));
    reinterpret_cast<uint4*>(step)[0] = make_uint4(w[0], w[1], w[2], w[3]);
    reinterpret_cast<uint4*>(step)[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

// Fills xs with `rows` rows of `count` blocks of 128 inputs, MT rows apart: multiplied by scale and transformed, or as they
// are if scale is null. row(i) is the first value of row i's first block. A warp takes four rows at a time, eight lanes with
// sixteen values each, which leaves three steps of the transform to shuffles.
template <int MT, class Row>
__device__ __forceinline__ void rotate_rows(half* xs, const half* scale, bool bf16, int rows, int count, int warp, int warps, int lane,
                                            Row&& row) {
    const int tasks = rows * count, part = 16 * (lane & 7);
    for (int first = 4 * warp; first < tasks; first += 4 * warps) {
        const int task = min(first + (lane >> 3), tasks - 1), r = task % rows, b = task / rows;
        float v[16];
        load16(row(r) + b * kStrip + part, bf16, v);
        if (scale) {
            float s[16];
            load16(reinterpret_cast<const uint16_t*>(scale) + b * kStrip + part, false, s);
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] *= 0.08838834764831845f * s[i];
#pragma unroll
            for (int bit = 1; bit < 16; bit <<= 1)
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (!(i & bit)) {
                        const float x = v[i], y = v[i | bit];
                        v[i] = x + y, v[i | bit] = x - y;
                    }
#pragma unroll
            for (int bit = 1; bit < 8; bit <<= 1)
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const float other = __shfl_xor_sync(0xffffffffu, v[i], bit);
                    v[i] = lane & bit ? other - v[i] : v[i] + other;
                }
        }
        if (first + (lane >> 3) < tasks) store_step(xs + (b * MT + r) * kRowHalves + part, v);
    }
}

__device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
__device__ __forceinline__ void copy16(uint32_t smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// One matrix as the kernels see it; trellis points at the tile column of the strip's first output.
struct Weights {
    const uint8_t* trellis;
    long row_bytes;  // of one row of tiles
    int k2, codebook;
};

// Blocks of 128 inputs whose rotated rows fit in shared memory at once: for decode the whole share of a block, as a rule.
template <int MT> constexpr int kChunk = MT <= 16 ? 6 : MT == 32 ? 3 : 2;
template <int MT> constexpr int kActivationBytes = kChunk<MT> * MT * kRowHalves * 2;

// acc += the warp's tile column times blocks [first, last) of 128 inputs, Rows tile rows of each from first_row on
// (4: two groups share a block; 8: one group has all of it).
//   rotate(block, count)  fill xs with the rotated rows of `count` blocks, MT rows each; begins after `started` has run
//   started()             weights are on their way: now wait for whoever writes the activations
//   barrier()             of the warps that share xs
template <int K2, int CB, int MT, int Rows, class Started, class Rotate, class Barrier>
__device__ __forceinline__ void multiply(float (&acc)[MT / 8][4], const Weights& w, int first, int last, int first_row, int column,
                                         uint8_t* ring, const half* xs, int lane, Started&& started, Rotate&& rotate,
                                         Barrier&& barrier) {
    constexpr int tile = Rate<K2>::bytes, stage = Rows * tile, stages = kRingBytes / stage;
    constexpr int pieces = stage / 16, per_tile = tile / 16, ahead = stages - 1;
    static_assert(stages >= 2, "one stage is read while another is filled");
    const uint32_t ring_address = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
    const uint8_t* source = w.trellis + column * tile + first_row * w.row_bytes;
    auto fetch = [&](int block) {
        if (block < last) {
            const uint8_t* from = source + 8L * block * w.row_bytes;
            const uint32_t to = ring_address + ((block - first) % stages) * stage;
#pragma unroll
            for (int p0 = 0; p0 < pieces; p0 += 32) {
                const int p = p0 + lane;
                if (pieces % 32 == 0 || p < pieces) copy16(to + 16 * p, from + (p / per_tile) * w.row_bytes + 16 * (p % per_tile));
            }
        }
        commit();  // empty groups at the end keep the number in flight constant
    };
    for (int i = 0; i < ahead; ++i) fetch(first + i);
    started();
    for (int chunk = first; chunk < last; chunk += kChunk<MT>) {
        const int end = min(chunk + kChunk<MT>, last);
        if (chunk != first) barrier();  // everybody is done with the rows of the chunk before
        rotate(chunk, end - chunk);
        barrier();
        for (int block = chunk; block < end; ++block) {
            wait<ahead - 1>();
            __syncwarp();
            fetch(block + ahead);  // into the stage that this warp left in the round before
            const uint8_t* tiles = ring + ((block - first) % stages) * stage;
            const half* x = xs + ((block - chunk) * MT + (lane >> 2)) * kRowHalves + 4 * (lane & 3) + 16 * first_row;
#pragma unroll 4  // all eight at once cost registers that the decode kernels do not have
            for (int r = 0; r < Rows; ++r) {
                uint32_t a[4];
                fragment<K2, CB>(reinterpret_cast<const uint32_t*>(tiles + r * tile), lane, a);
#pragma unroll
                for (int t = 0; t < MT / 8; ++t) mma(acc[t], a, *reinterpret_cast<const uint2*>(x + 8 * t * kRowHalves + 16 * r));
            }
        }
    }
    wait<0>();
}

// The warp's accumulators to sums[row][output of the strip].
template <int MT> __device__ __forceinline__ void spill(float (&acc)[MT / 8][4], float* sums, int column, int lane) {
#pragma unroll
    for (int t = 0; t < MT / 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[(8 * t + 2 * (lane & 3) + (i & 1)) * kSumRow + 16 * column + (lane >> 2) + 8 * (i >> 1)] = acc[t][i];
}

// v += elements 4*lane .. +3 of a row of sums, over the blocks of the cluster in the order of their ranks.
__device__ __forceinline__ void gather(cg::cluster_group& cluster, float* row, int lane, float v[4]) {
    const int ranks = cluster.num_blocks();
#pragma unroll 8
    for (int rank = 0; rank < ranks; ++rank) {
        const float4 part = *reinterpret_cast<float4*>(cluster.map_shared_rank(row, rank) + 4 * lane);
        v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
}

// Blocks of k for this block of the cluster: an even split, the first ones take the rest.
__device__ __forceinline__ void share(int blocks, int parts, int part, int& first, int& last) {
    const int base = blocks / parts, rest = blocks % parts;
    first = part * base + min(part, rest);
    last = first + base + (part < rest);
}

// Dynamic shared memory: the rings and `sets` of rotated rows; afterwards the sums of the groups in their place.
template <int MT> constexpr int shared_bytes(int groups, int sets) {
    const int work = 8 * groups * kRingBytes + sets * kActivationBytes<MT>, sums = groups * MT * kSumRow * 4;
    return work > sums ? work : sums;
}

constexpr int kDenseBytes = kStrip * (kStrip + 1) * 4;  // a block of dense weights, rows padded

// Launch with a cluster and programmatic dependence: the kernel may begin while the one before it in the stream ends, and
// waits for it (cudaGridDependencySynchronize) before it touches anything but weights.
template <class Args> cudaError_t launch(void (*kernel)(Args), dim3 grid, int threads, int shared, int cluster, cudaStream_t stream, const Args& args) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, args);
}

inline cudaError_t multiprocessors(int& count) {
    int device;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) : error;
}

// Blocks of a cluster for `units` strips of `blocks` k blocks, one group of eight warps each: the size with the least time
// by a rough model, fitted to timings: a block of 128 inputs takes 10, or 7 for each strip that shares a multiprocessor; one
// more for beginning and end; each block of the cluster adds 3. Other sizes pack badly into a device's clusters.
inline cudaError_t cluster_size(int units, int blocks, int& cluster) {
    int count;
    const cudaError_t error = multiprocessors(count);
    if (error != cudaSuccess) return error;
    long least = 0;
    for (const int size : {1, 2, 3, 4, 8}) {
        if (size > blocks) break;
        const long load = 7 * ((static_cast<long>(units) * size + count - 1) / count);
        const long time = ((blocks + size - 1) / size + 1) * (load > 10 ? load : 10) + 3 * (size - 1);
        if (size == 1 || time < least) least = time, cluster = size;
    }
    return cudaSuccess;
}

}  // namespace exl3
