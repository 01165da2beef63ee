// SPDX-License-Identifier: Apache-2.0
// Routed experts for few tokens: out[t] = sum over t's experts of weight * down(act(gate(x)) * up(x)).
//
// Three launches: gate and up with the activation and the rotation for down; down; the weighted sum in the order of topk_ids.
// A slot is up to MT (token, expert) pairs of one expert. Every block finds its slot from topk_ids by itself: for the few
// pairs of decode that costs less than a launch that sorts them. Slots beyond the last one end at once.
#include "strip.cuh"

namespace exl3 {

constexpr int kThreads = 512;     // two groups of eight warps
constexpr int kPairs = kThreads;  // one thread looks at each pair
struct Experts {                  // [experts, ...] of each tensor of a layer
    const uint8_t* trellis;
    const half *suh, *svh;
    int k2, codebook;
};
struct MoeArgs {
    const void* x;
    void* out;
    const void* ids;         // [tokens, top], int32 or int64
    const float* weights;    // [tokens, top]
    const int* expert_map;   // global expert -> local one or -1; or null
    half* activated;         // workspace [tokens * top, inter]: rotated input of down
    float* down_rows;        // workspace [tokens * top, hidden]
    long x_stride, out_stride;
    int tokens, top, experts, mapped, hidden, inter, bf16, ids_long;
    float limit;             // of gate (above) and up (both sides) before the activation; 0: none
    Experts gate, up, down;
};

// The local expert of a pair; -1: padding, or an expert that lives elsewhere.
__device__ __forceinline__ int expert_of(const MoeArgs& args, int pair) {
    long id = args.ids_long ? static_cast<const int64_t*>(args.ids)[pair] : static_cast<const int*>(args.ids)[pair];
    if (args.expert_map) id = id >= 0 && id < args.mapped ? args.expert_map[id] : -1;
    return id >= 0 && id < args.experts ? static_cast<int>(id) : -1;
}

template <int MT> struct Slot {
    int expert, rows;
    int pair[MT];
};

// Slots are numbered in the order of their first pairs. Returns whether slot `number` exists.
template <int MT> __device__ bool find_slot(const MoeArgs& args, int number, Slot<MT>& slot) {
    __shared__ short experts[kPairs];
    __shared__ int leaders[kThreads / 32];
    __shared__ int first_rank;
    const int pairs = args.tokens * args.top, pair = threadIdx.x;
    const int expert = pair < pairs ? expert_of(args, pair) : -1;
    experts[pair] = expert;
    if (pair == 0) slot.expert = -1, slot.rows = 0;
    __syncthreads();
    int rank = 0;
    for (int p = 0; p < min(pair, pairs); ++p) rank += experts[p] == expert;
    const bool leader = expert >= 0 && rank % MT == 0;
    const unsigned mask = __ballot_sync(0xffffffffu, leader);
    if ((pair & 31) == 0) leaders[pair >> 5] = __popc(mask);
    __syncthreads();
    int before = __popc(mask & ((1u << (pair & 31)) - 1));
    for (int w = 0; w < pair >> 5; ++w) before += leaders[w];
    if (leader && before == number) slot.expert = expert, first_rank = rank;
    __syncthreads();
    if (slot.expert < 0) return false;
    if (expert == slot.expert && rank >= first_rank && rank < first_rank + MT) {
        slot.pair[rank - first_rank] = pair;
        atomicAdd(&slot.rows, 1);
    }
    __syncthreads();
    return true;
}

__device__ __forceinline__ Weights strip_of(const Experts& m, int expert, int strip, int k, int n, int tile_bytes) {
    return {m.trellis + (static_cast<long>(expert) * (k / 16) * (n / 16) + 8 * strip) * tile_bytes, static_cast<long>(n / 16) * tile_bytes,
            m.k2, m.codebook};
}

// Group 0 of the block multiplies gate, group 1 up: both halves of the strip's activation meet in one block.
template <int MT> __global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Slot<MT> slot;
    cg::cluster_group cluster = cg::this_cluster();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp >> 3, column = warp & 7, strip = blockIdx.y;
    cudaGridDependencySynchronize();  // topk_ids; down, which begins after this, may read them at once
    if (!find_slot<MT>(args, blockIdx.z, slot)) return;
    const Experts& matrix = group ? args.up : args.gate;
    int first, last;
    share(args.hidden / kStrip, cluster.num_blocks(), cluster.block_rank(), first, last);
    half* xs = reinterpret_cast<half*>(shared + 16 * kRingBytes + group * kActivationBytes<MT>);
    const half* suh = matrix.suh + static_cast<long>(slot.expert) * args.hidden;

    float acc[MT / 8][4] = {};
    auto rotate = [&](int block, int count) {
        const uint16_t* x = static_cast<const uint16_t*>(args.x) + block * kStrip;
        rotate_rows<MT>(xs, suh + block * kStrip, args.bf16, slot.rows, count, column, 8, lane,
                        [&](int row) { return x + slot.pair[row] / args.top * args.x_stride; });
    };
    dispatch(matrix.k2, matrix.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value;
        multiply<K2, CB, MT, 8>(acc, strip_of(matrix, slot.expert, strip, args.hidden, args.inter, Rate<K2>::bytes), first, last, 0,
                                column, shared + warp * kRingBytes, xs, lane, [] {}, rotate,
                                [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); });
    });
    cudaTriggerProgrammaticLaunchCompletion();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    spill<MT>(acc, sums + group * MT * kSumRow, column, lane);
    cluster.sync();
    for (int row = cluster.block_rank() + cluster.num_blocks() * warp; row < slot.rows; row += cluster.num_blocks() * (kThreads / 32)) {
        const int out = strip * kStrip + 4 * lane;
        const long vector = static_cast<long>(slot.expert) * args.inter + out;
        float g[4] = {}, u[4] = {}, scale[4];
        gather(cluster, sums + row * kSumRow, lane, g);
        gather(cluster, sums + (MT + row) * kSumRow, lane, u);
        hadamard(g, lane);
        hadamard(u, lane);
        unpack4(raw4(args.gate.svh, vector), false, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] *= scale[e];
        unpack4(raw4(args.up.svh, vector), false, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) u[e] *= scale[e];
        unpack4(raw4(args.down.suh, vector), false, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (args.limit > 0) g[e] = fminf(g[e], args.limit), u[e] = fminf(fmaxf(u[e], -args.limit), args.limit);
            g[e] = g[e] / (1.0f + __expf(-g[e])) * u[e] * scale[e];
        }
        hadamard(g, lane);
        store4(args.activated, static_cast<long>(slot.pair[row]) * args.inter + out, false, g);
    }
    cluster.sync();
}

template <int MT> __global__ void __launch_bounds__(kThreads, 2) down_kernel(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Slot<MT> slot;
    cg::cluster_group cluster = cg::this_cluster();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp >> 3, column = warp & 7, strip = blockIdx.y;
    if (!find_slot<MT>(args, blockIdx.z, slot)) return;
    int first, last;
    share(args.inter / kStrip, cluster.num_blocks(), cluster.block_rank(), first, last);
    half* xs = reinterpret_cast<half*>(shared + 16 * kRingBytes);

    float acc[MT / 8][4] = {};
    auto copy = [&](int block, int count) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(args.activated) + block * kStrip;
        rotate_rows<MT>(xs, nullptr, false, slot.rows, count, warp, kThreads / 32, lane,
                        [&](int row) { return x + static_cast<long>(slot.pair[row]) * args.inter; });
    };
    dispatch(args.down.k2, args.down.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value;
        multiply<K2, CB, MT, 4>(acc, strip_of(args.down, slot.expert, strip, args.inter, args.hidden, Rate<K2>::bytes), first, last,
                                4 * group, column, shared + warp * kRingBytes, xs, lane, [] { cudaGridDependencySynchronize(); }, copy,
                                [] { __syncthreads(); });
    });
    cudaTriggerProgrammaticLaunchCompletion();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    spill<MT>(acc, sums + group * MT * kSumRow, column, lane);
    cluster.sync();
    for (int row = cluster.block_rank() + cluster.num_blocks() * warp; row < slot.rows; row += cluster.num_blocks() * (kThreads / 32)) {
        const int out = strip * kStrip + 4 * lane;
        float v[4] = {}, scale[4];
        gather(cluster, sums + row * kSumRow, lane, v);
        gather(cluster, sums + (MT + row) * kSumRow, lane, v);
        hadamard(v, lane);
        unpack4(raw4(args.down.svh, static_cast<long>(slot.expert) * args.hidden + out), false, scale);
        *reinterpret_cast<float4*>(args.down_rows + static_cast<long>(slot.pair[row]) * args.hidden + out) =
            make_float4(v[0] * scale[0], v[1] * scale[1], v[2] * scale[2], v[3] * scale[3]);
    }
    cluster.sync();
}

__global__ void __launch_bounds__(128) sum_kernel(const __grid_constant__ MoeArgs args) {
    const int token = blockIdx.y, i = 4 * (blockIdx.x * 128 + threadIdx.x);
    cudaGridDependencySynchronize();
    if (i >= args.hidden) return;
    float v[4] = {};
    for (int j = 0; j < args.top; ++j) {
        const int pair = token * args.top + j;
        if (expert_of(args, pair) < 0) continue;  // no one has written that row
        const float4 row = __ldcg(reinterpret_cast<const float4*>(args.down_rows + static_cast<long>(pair) * args.hidden + i));
        const float weight = args.weights[pair];
        v[0] += weight * row.x, v[1] += weight * row.y, v[2] += weight * row.z, v[3] += weight * row.w;
    }
    store4(args.out, token * args.out_stride + i, args.bf16, v);
}

template <int MT> cudaError_t run(const MoeArgs& args, cudaStream_t stream) {
    const int pairs = args.tokens * args.top, slots = min(pairs, args.experts + pairs / MT);
    const int inner = args.inter / kStrip, outer = args.hidden / kStrip;
    int count;
    cudaError_t error = multiprocessors(count);
    // Only so many blocks per strip that every multiprocessor has two: each of them looks for its slot anew.
    auto cluster = [&](int strips, int blocks) {
        int size = 1;
        while (size < 8 && 2 * size <= blocks && slots * strips * size < 2 * count) size *= 2;
        return size;
    };
    if (error == cudaSuccess) {
        const int size = cluster(inner, outer);
        error = launch(gate_up_kernel<MT>, dim3(size, inner, slots), kThreads, shared_bytes<MT>(2, 2), size, stream, args);
    }
    if (error == cudaSuccess) {
        const int size = cluster(outer, inner);
        error = launch(down_kernel<MT>, dim3(size, outer, slots), kThreads, shared_bytes<MT>(2, 1), size, stream, args);
    }
    if (error != cudaSuccess) return error;
    return launch(sum_kernel, dim3((args.hidden + 511) / 512, args.tokens), 128, 0, 1, stream, args);
}

}  // namespace exl3

extern "C" int exl3_moe(const exl3::MoeArgs* args, cudaStream_t stream) { return exl3::run<8>(*args, stream); }
