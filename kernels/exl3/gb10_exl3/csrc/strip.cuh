// SPDX-License-Identifier: Apache-2.0
// The inner product that linear and MoE share: a block multiplies rotated activation rows by a strip of 128 outputs.
//
// Warp c of a block's eight owns tile column c of the strip. It streams its own tiles through its own ring in shared memory,
// so that weights need no barrier between warps; only the rotated activations, which all share, do.
// Weights are the A operand (16 outputs x 16 inputs), activations the B operand (8 rows): a tile costs one MMA per eight
// rows, and the accumulator holds outputs (lane>>2), +8 and rows 2*(lane&3), +1.
#pragma once
#include "decode.cuh"
#include <algorithm>
#include <cooperative_groups.h>
#include <cuda_bf16.h>

namespace exl3 {

namespace cg = cooperative_groups;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStrip = 128;       // outputs of a strip and inputs of a block of k: the size of the rotation
constexpr int kRowHalves = 144;   // a row of 128 rotated halves and 16 of padding: fragment reads meet no bank twice
constexpr int kSumRow = 132;      // a row of 128 sums, padded for the same reason
constexpr int kRingBytes = 4096;  // of one warp: two stages of eight tiles at 8 bits, five at 3
// Blocks of a multiprocessor that registers must allow for: as many as shared memory does, of which GB10 has for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <int MT> constexpr int kResident = 1;
#else
template <int MT> constexpr int kResident = MT <= 16 ? 3 : 2;
#endif

// Two values as halves or as bfloat16.
__device__ __forceinline__ uint32_t pack2(float x, float y, bool bf16) {
    if (!bf16) return bits(__floats2half2_rn(x, y));
    __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t*>(&both);
}
__device__ __forceinline__ void store4(void* p, long i, bool bf16, const float v[4]) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p) + i) = make_uint2(pack2(v[0], v[1], bf16), pack2(v[2], v[3], bf16));
}
// Four consecutive 16-bit values, raw: loaded early, converted where they are used.
__device__ __forceinline__ uint2 raw4(const half* p, long i) { return __ldg(reinterpret_cast<const uint2*>(p + i)); }
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

__device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
// Steps of a transform between the rows of v.
template <int N, int M> __device__ __forceinline__ void across(float (&v)[N][M]) {
#pragma unroll
    for (int bit = 1; bit < N; bit <<= 1)
#pragma unroll
        for (int t = 0; t < N; ++t)
#pragma unroll
            for (int i = 0; i < M; ++i)
                if (!(t & bit)) {
                    const float x = v[t][i], y = v[t | bit][i];
                    v[t][i] = x + y, v[t | bit][i] = x - y;
                }
}

// The 16 x 16 matrix of signs (-1)^popcount(i & j), as A operand, over bits 0, 1, 3 and 4 of positions in a block of 128. For
// inputs i lane q = lane & 3 has 8q .. 8q+3; for outputs j, bit 0 is between a lane's registers, bits 1, 3 and 4 are lane / 4.
struct Signs {
    uint32_t a[4];
    __device__ explicit Signs(int lane) {
        const int n = lane >> 2, output = (n & 1) << 1 | (n & 6) << 2;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            a[w] = 0;
#pragma unroll
            for (int e = 0; e < 2; ++e) a[w] |= (0x3C00u | (__popc((8 * (lane & 3) + (w & 2) + e) & (output | (w & 1))) & 1u) << 15) << (16 * e);
        }
    }
};
// x * scale, two halves; x of either type.
__device__ __forceinline__ uint32_t scaled(uint32_t x, uint32_t scale, bool bf16) {
    if (!bf16) return bits(__hmul2(halves(x), halves(scale)));
    const float2 s = __half22float2(halves(scale));
    return bits(__floats2half2_rn(__uint_as_float(x << 16) * s.x, __uint_as_float(x & 0xffff0000u) * s.y));
}

// Rows of a block of 128 inputs in shared memory: one or two if there are no more, which shuffles transform, else MT. The two ways
// round differently: `few` allows the first where the same rows always come together.
template <int MT> __device__ __forceinline__ int pitch_of(bool few, int rows) { return MT == 8 && few && rows <= 2 ? rows : MT; }

// Fills xs with `rows` rows of `count` blocks of 128 inputs, `pitch` rows apart: multiplied by scale and transformed, or as they
// are if scale is null. row(i) is the first value of row i's first block; the kernel before may have written it after this one
// began, so that it is read from the second-level cache. In a step of sixteen, pairs lie in the order 0 4 1 5 2 6 3 7, in which a
// lane finds its part of a B operand in one piece. One or two rows are transformed by shuffles; of more, a warp takes eight rows
// of a block at a time (what is beyond the last one is of no use and does no harm): tensor cores do four bits of the transform,
// the other three (2, 5, 6) are between a lane's own registers.
template <int MT, class Row>
__device__ __forceinline__ void rotate_rows(half* xs, const half* scale, bool bf16, int pitch, int rows, int count, int warp, int lane, Row&& row) {
    const int q = lane & 3;
    if constexpr (MT == 8)
        if (pitch < MT) {
            const int units = rows * count;
            for (int first = warp; first < units; first += 2 * kWarps) {  // two are on their way at a time
                uint2 x[2], f[2];
                int r[2], block[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int unit = first + j * kWarps;
                    r[j] = unit >= count, block[j] = unit - (r[j] ? count : 0);
                    if (unit >= units) continue;
                    x[j] = __ldcg(reinterpret_cast<const uint2*>(row(r[j]) + block[j] * kStrip + 4 * lane));
                    if (scale) f[j] = raw4(scale, block[j] * kStrip + 4 * lane);
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (first + j * kWarps >= units) break;
                    if (scale) {
                        float v[4], s[4];
                        unpack4(x[j], bf16, v);
                        unpack4(f[j], false, s);
#pragma unroll
                        for (int e = 0; e < 4; ++e) v[e] *= s[e];
                        hadamard(v, lane);
                        x[j] = make_uint2(pack2(v[0], v[1], false), pack2(v[2], v[3], false));
                    }
                    uint32_t* step = reinterpret_cast<uint32_t*>(xs + (block[j] * pitch + r[j]) * kRowHalves);
                    step += 8 * (lane >> 2) + 4 * (lane & 1) + (q >> 1);
                    step[0] = x[j].x, step[2] = x[j].y;
                }
            }
            return;
        }
    const int groups = (rows + 7) / 8;
    for (int unit = warp; unit < groups * count; unit += kWarps) {
        int block = unit, group = 0;
        while (block >= count) block -= count, ++group;
        const int r = 8 * group + (lane >> 2);
        const uint4* x = reinterpret_cast<const uint4*>(row(min(r, rows - 1)) + block * kStrip + 8 * q);
        half* to = xs + (block * MT + r) * kRowHalves;
        if (!scale) {
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const uint4 w = __ldcg(x + 4 * p);
                uint32_t* step = reinterpret_cast<uint32_t*>(to + 16 * (2 * p + (q >> 1))) + (q & 1);
                step[0] = w.x, step[2] = w.y, step[4] = w.z, step[6] = w.w;
            }
            continue;
        }
        const Signs signs(lane);
        const uint4* s = reinterpret_cast<const uint4*>(scale + block * kStrip + 8 * q);
        float v[8][4];  // steps (bits 5 and 6, bit 2); outputs (bit 0) x rows (2q, 2q + 1)
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            asm volatile("" ::: "memory");  // a quarter of the loads at a time, for want of registers
            const uint4 w = __ldcg(x + 4 * p), f = __ldg(s + 4 * p);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[2 * p][i] = v[2 * p + 1][i] = 0;
            mma(v[2 * p], signs.a, make_uint2(scaled(w.x, f.x, bf16), scaled(w.y, f.y, bf16)));
            mma(v[2 * p + 1], signs.a, make_uint2(scaled(w.z, f.z, bf16), scaled(w.w, f.w, bf16)));
        }
        across<8, 4>(v);
        const int n = lane >> 2;  // bits 1, 3, 4 of the outputs
        uint32_t* out = reinterpret_cast<uint32_t*>(to + (2 * q - n) * kRowHalves) + 8 * (n >> 2) + 2 * (n & 1) + (n >> 1 & 1);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            constexpr float root = 0.08838834764831845f;
            out[8 * (t & 6) + 4 * (t & 1)] = bits(__floats2half2_rn(v[t][0] * root, v[t][2] * root));
            out[8 * (t & 6) + 4 * (t & 1) + kRowHalves / 2] = bits(__floats2half2_rn(v[t][1] * root, v[t][3] * root));
        }
    }
}

__device__ __forceinline__ void copy16(uint32_t smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// One matrix as the kernels see it; trellis points at the tile column of the strip's first output.
struct Weights {
    const uint8_t* trellis;
    int row_bytes;  // of one row of tiles
};

// Rotated rows of 128 inputs that are in shared memory at once: for decode the whole share of a block, as a rule.
template <int MT> constexpr int kRotated = MT == 8 || MT == 64 ? 64 : 96;

// acc += the warp's tile column times blocks [first, last) of 128 inputs, for `rows` rows.
//   started()             weights are on their way: now wait for whoever writes the activations
//   rotate(block, count)  fill xs with the rotated rows of `count` blocks, `pitch` rows each
template <int K2, int CB, int MT, class Started, class Rotate>
__device__ __forceinline__ void multiply(float (&acc)[MT / 8][4], const Weights& w, int first, int last, int rows, int pitch, int column,
                                         uint8_t* ring, const half* xs, int lane, Started&& started, Rotate&& rotate) {
    constexpr int tile = Rate<K2>::bytes, stage = 8 * tile, stages = kRingBytes / stage, ahead = stages - 1;
    static_assert(stages >= 2, "one stage is read while another is filled");
    // Four lanes copy the tile of a row, in pieces of 16 bytes.
    const uint8_t* source = w.trellis + column * tile + (8L * first + (lane >> 2)) * w.row_bytes + 16 * (lane & 3);
    const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + (lane >> 2) * tile + 16 * (lane & 3);
    uint32_t target = begin;
    auto fetch = [&](bool any) {
        if (any) {
#pragma unroll
            for (int i = 0; i < K2; i += 4)
                if (i + 4 <= K2 || i + (lane & 3) < K2) copy16(target + 16 * i, source + 16 * i);
            source += 8 * w.row_bytes;
            target = target == begin + ahead * stage ? begin : target + stage;
        }
        commit();  // empty groups at the end keep the number in flight constant
    };
    for (int i = 0; i < ahead; ++i) fetch(first + i < last);
    started();
    const uint8_t* tiles = ring;
    const int most = kRotated<MT> / pitch;
    for (int chunk = first; chunk < last; chunk += most) {
        const int end = min(chunk + most, last);
        if (chunk != first) __syncthreads();  // everybody is done with the rows of the chunk before
        rotate(chunk, end - chunk);
        __syncthreads();
        for (int block = chunk; block < end; ++block) {
            wait<ahead - 1>();
            __syncwarp();
            fetch(block + ahead < last);  // into the stage that this warp left in the round before
            // Of fewer rows than eight, the lanes of those that are not there read the last one.
            const half* x = xs + ((block - chunk) * pitch + min(lane >> 2, pitch - 1)) * kRowHalves + 4 * (lane & 3);
#pragma unroll(MT <= 16 ? 8 : 4)  // a block at a time is some 7 % faster than two tiles; many rows have no registers for it
            for (int r = 0; r < 8; ++r) {
                uint32_t a[4];
                fragment<K2, CB>(reinterpret_cast<const uint32_t*>(tiles + r * tile), lane, a);
#pragma unroll
                for (int t = 0; t < MT / 8; ++t)
                    if (t == 0 || 8 * t < rows) mma(acc[t], a, *reinterpret_cast<const uint2*>(x + 8 * t * kRowHalves + 16 * r));
            }
            tiles = tiles == ring + ahead * stage ? ring : tiles + stage;
        }
    }
    wait<0>();
}

// The sums of a strip meet in the shared memory of its cluster: row r in block r % ranks, with a line of 128 from each block.
// A block that has got all of its lines adds them in their order; nobody reads from a block that may have ended. All blocks
// must have begun (the cluster's barrier) before one sends.
__device__ __forceinline__ float* line_of(float* inbox, int row, int sender, int ranks) { return inbox + (row / ranks * ranks + sender) * kSumRow; }
template <int MT>
__device__ __forceinline__ void send(cg::cluster_group& cluster, const float (&acc)[MT / 8][4], float* inbox, int rows, int column, int lane) {
    const int ranks = cluster.num_blocks(), rank = cluster.block_rank();
#pragma unroll
    for (int t = 0; t < MT / 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * t + 2 * (lane & 3) + i;
            if (row < rows) {
                float* line = cluster.map_shared_rank(line_of(inbox, row, rank, ranks), row % ranks);
                line[16 * column + (lane >> 2)] = acc[t][i];
                line[16 * column + (lane >> 2) + 8] = acc[t][i + 2];
            }
        }
}
// v += elements 4*lane .. +3 of a row, from the senders first, first + step, ...
__device__ __forceinline__ void receive(float* inbox, int row, int first, int ranks, int step, int lane, float v[4]) {
#pragma unroll 4
    for (int sender = first; sender < ranks; sender += step) {
        const float4 part = *reinterpret_cast<const float4*>(line_of(inbox, row, sender, ranks) + 4 * lane);
        v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
}

// Blocks of k for this block of the cluster: an even split, the first ones take the rest.
__device__ __forceinline__ void share(int blocks, int parts, int part, int& first, int& last) {
    const int base = blocks / parts, rest = blocks % parts;
    first = part * base + min(part, rest);
    last = first + base + (part < rest);
}

// Dynamic shared memory: the rings, the rotated rows, the inbox (rows up to a multiple of the largest cluster).
template <int MT> struct Shared {
    static constexpr int xs = kWarps * kRingBytes, inbox = xs + kRotated<MT> * kRowHalves * 2, bytes = inbox + (MT + 7) * kSumRow * 4;
};

// Into the second-level cache: what nobody writes may be asked for before the kernel in front has ended.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void prefetch_halves(const half* p, int count) {
    for (int i = 64 * threadIdx.x; i < count; i += 64 * blockDim.x) prefetch(p + i);
}

inline cudaError_t attribute(cudaDeviceAttr which, int& value) {
    int device;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(&value, which, device) : error;
}

// Launch with a cluster and programmatic dependence: the kernel may begin while the one before it in the stream ends, and
// waits for it (cudaGridDependencySynchronize) before it touches anything but weights.
template <class Args> cudaError_t launch(void (*kernel)(Args), dim3 grid, int shared, int cluster, cudaStream_t stream, const Args& args) {
    int count, memory;
    cudaError_t error = attribute(cudaDevAttrMultiProcessorCount, count);
    if (error == cudaSuccess) error = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, memory);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(kThreads), config.stream = stream;
    config.attrs = attributes, config.numAttrs = 2;
    // One block to a multiprocessor if the device takes all of them so, else two: left alone, they crowd on some. To ask for a
    // half or a third of its memory sees to that.
    const long blocks = static_cast<long>(grid.x) * grid.y * grid.z;
    for (int most = shared && blocks <= 2L * count ? 1 : 3;; ++most) {
        config.dynamicSmemBytes = most < 3 ? std::max(shared, memory / (most + 1)) : shared;
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.dynamicSmemBytes));
        if (error != cudaSuccess) return error;
        int clusters = 0;
        if (most < 3) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
        if (error != cudaSuccess) return error;
        if (most == 3 || clusters * cluster >= blocks) return cudaLaunchKernelEx(&config, kernel, args);
    }
}

// Blocks of a cluster for `units` strips of `blocks` k blocks, one block of eight warps each with so much shared memory: the size,
// at most `most`, with the least time by a rough model, fitted to timings. A block of 128 inputs takes 14 for each strip that
// shares a multiprocessor and 17 for one that has it to itself; a strip that has to wait for room takes 40 more to begin. Sizes
// that do not spread evenly over the multiprocessors are left out.
inline cudaError_t cluster_size(int units, int blocks, int shared, int most, int& cluster) {
    int count, memory;
    cudaError_t error = attribute(cudaDevAttrMultiProcessorCount, count);
    if (error == cudaSuccess) error = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, memory);
    if (error != cudaSuccess) return error;
    const long resident = std::clamp(memory / shared, 1, 3);
    long least = 0;
    for (const int size : {1, 2, 4, 5, 8}) {
        if (size > blocks || size > most) break;
        const long load = (static_cast<long>(units) * size + count - 1) / count;
        const long time = (blocks + size - 1) / size * (std::min(load, resident) > 1 ? 14 : 17) * load + 40 * std::max(0L, load - resident);
        if (size == 1 || time < least) least = time, cluster = size;
    }
    return cudaSuccess;
}

}  // namespace exl3
