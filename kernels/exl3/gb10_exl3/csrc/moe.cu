// SPDX-License-Identifier: Apache-2.0
// Routed experts: out[t] = sum over t's experts of weight * down(act(gate(x)) * up(x)).
//
// Launches: gate and up with the activation and the rotation for down; down; the weighted sum in the order of topk_ids. A slot
// is up to MT (token, expert) pairs of one expert. Of few pairs every block finds its slot from topk_ids by itself, which costs
// less than a launch that sorts them; of many one block sorts them first. A row's sums do not depend on its place in a slot, so
// that the order in which that block meets them does not matter. Slots beyond the last one end at once.
#include "strip.cuh"

namespace exl3 {

constexpr int kPairs = kThreads;   // of a launch without sorting: one thread looks at each
constexpr int kSortThreads = 1024;
constexpr int kMaxExperts = 2 * kSortThreads;
struct Experts {  // [experts, ...] of each tensor of a layer
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
    int* routes;             // workspace [1 + 4 * tokens * top]: number of slots; expert, first place and rows of each; pairs by place
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

// Sorts the pairs by expert into slots of `height` rows. One block.
__global__ void __launch_bounds__(kSortThreads) route_kernel(const __grid_constant__ MoeArgs args, int height) {
    __shared__ int cursor[kMaxExperts];  // pairs of an expert; then the next place among those of all
    __shared__ int2 sums[kSortThreads / 32];
    const int t = threadIdx.x, lane = t & 31, pairs = args.tokens * args.top;
    int* places = args.routes + 1 + 3 * pairs;
    cursor[2 * t] = cursor[2 * t + 1] = 0;
    cudaGridDependencySynchronize();
    __syncthreads();
    for (int pair = t; pair < pairs; pair += kSortThreads)
        if (const int expert = expert_of(args, pair); expert >= 0) atomicAdd(&cursor[expert], 1);
    __syncthreads();
    const int rows[2] = {cursor[2 * t], cursor[2 * t + 1]};
    const int slots[2] = {(rows[0] + height - 1) / height, (rows[1] + height - 1) / height};
    int2 until = {rows[0] + rows[1], slots[0] + slots[1]};  // of this thread's experts and all before them
    const int2 own = until;
    auto scan = [&](int2& v) {
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int x = __shfl_up_sync(0xffffffffu, v.x, step), y = __shfl_up_sync(0xffffffffu, v.y, step);
            if (lane >= step) v.x += x, v.y += y;
        }
    };
    scan(until);
    if (lane == 31) sums[t >> 5] = until;
    __syncthreads();
    if (t < 32) {
        int2 v = sums[t];
        scan(v);
        sums[t] = v;
    }
    __syncthreads();
    if (t >= 32) until.x += sums[(t >> 5) - 1].x, until.y += sums[(t >> 5) - 1].y;
    int first = until.x - own.x, slot = until.y - own.y;
    for (int e = 0; e < 2; ++e) {
        cursor[2 * t + e] = first;
        for (int done = 0; done < rows[e]; done += height, ++slot) {
            int* entry = args.routes + 1 + 3 * slot;
            entry[0] = 2 * t + e, entry[1] = first + done, entry[2] = min(height, rows[e] - done);
        }
        first += rows[e];
    }
    if (t == kSortThreads - 1) args.routes[0] = slot;
    __syncthreads();
    for (int pair = t; pair < pairs; pair += kSortThreads)
        if (const int expert = expert_of(args, pair); expert >= 0) places[atomicAdd(&cursor[expert], 1)] = pair;
}

// Slots of few pairs are numbered in the order of their first pairs. Returns whether slot `number` exists.
template <int MT> __device__ bool find_slot(const MoeArgs& args, int number, Slot<MT>& slot) {
    __shared__ short experts[kPairs];
    __shared__ int leaders[kWarps];
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
template <int MT> __device__ bool locate(const MoeArgs& args, int number, Slot<MT>& slot) {
    const int pairs = args.tokens * args.top;
    if (pairs <= kPairs) return find_slot<MT>(args, number, slot);
    if (number >= args.routes[0]) return false;
    const int *entry = args.routes + 1 + 3 * number, rows = entry[2];
    if (threadIdx.x == 0) slot.expert = entry[0], slot.rows = rows;
    if (threadIdx.x < rows) slot.pair[threadIdx.x] = args.routes[1 + 3 * pairs + entry[1] + threadIdx.x];
    __syncthreads();
    return true;
}

__device__ __forceinline__ Weights strip_of(const Experts& m, int expert, int strip, int k, int n, int tile_bytes) {
    return {m.trellis + (static_cast<long>(expert) * (k / 16) * (n / 16) + 8 * strip) * tile_bytes, n / 16 * tile_bytes};
}

// Even blocks of the cluster multiply gate, odd ones up: both halves of a row's activation meet in one block.
template <int MT> __global__ void __launch_bounds__(kThreads, kResident<MT>) gate_up_kernel(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Slot<MT> slot;
    cg::cluster_group cluster = cg::this_cluster();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, strip = blockIdx.y, ranks = cluster.num_blocks(), rank = cluster.block_rank();
    cudaGridDependencySynchronize();  // topk_ids; down, which begins after this, may read them at once
    cudaTriggerProgrammaticLaunchCompletion();
    if (!locate<MT>(args, blockIdx.z, slot)) return;
    cluster.barrier_arrive();
    const Experts& matrix = rank & 1 ? args.up : args.gate;
    int first, last;
    share(args.hidden / kStrip, ranks / 2, rank / 2, first, last);
    half* xs = reinterpret_cast<half*>(shared + Shared<MT>::xs);
    float* inbox = reinterpret_cast<float*>(shared + Shared<MT>::inbox);
    const half* suh = matrix.suh + static_cast<long>(slot.expert) * args.hidden;
    const long outputs = static_cast<long>(slot.expert) * args.inter + strip * kStrip;
    for (const half* vector : {args.gate.svh, args.up.svh, args.down.suh}) prefetch_halves(vector + outputs, kStrip);

    const int pitch = pitch_of<MT>(args.tokens * args.top <= kPairs, slot.rows);
    float acc[MT / 8][4] = {};
    auto rotate = [&](int block, int count) {
        const uint16_t* x = static_cast<const uint16_t*>(args.x) + block * kStrip;
        rotate_rows<MT>(xs, suh + block * kStrip, args.bf16, pitch, slot.rows, count, warp, lane,
                        [&](int row) { return x + slot.pair[row] / args.top * args.x_stride; });
    };
    dispatch(matrix.k2, matrix.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value;
        multiply<K2, CB, MT>(acc, strip_of(matrix, slot.expert, strip, args.hidden, args.inter, Rate<K2>::bytes), first, last, slot.rows,
                             pitch, warp, shared + warp * kRingBytes, xs, lane, [] {}, rotate);
    });
    // What the end needs is asked for before the others are waited for.
    const uint2 gate_svh = raw4(args.gate.svh, outputs + 4 * lane), up_svh = raw4(args.up.svh, outputs + 4 * lane);
    const uint2 down_suh = raw4(args.down.suh, outputs + 4 * lane);
    cluster.barrier_wait();
    send<MT>(cluster, acc, inbox, slot.rows, warp, lane);
    cluster.sync();
    for (int row = rank + ranks * warp; row < slot.rows; row += ranks * kWarps) {
        float g[4] = {}, u[4] = {}, scale[4];
        receive(inbox, row, 0, ranks, 2, lane, g);
        receive(inbox, row, 1, ranks, 2, lane, u);
        hadamard(g, lane);
        hadamard(u, lane);
        unpack4(gate_svh, false, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] *= scale[e];
        unpack4(up_svh, false, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) u[e] *= scale[e];
        unpack4(down_suh, false, scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (args.limit > 0) g[e] = fminf(g[e], args.limit), u[e] = fminf(fmaxf(u[e], -args.limit), args.limit);
            g[e] = g[e] / (1.0f + __expf(-g[e])) * u[e] * scale[e];
        }
        hadamard(g, lane);
        store4(args.activated, static_cast<long>(slot.pair[row]) * args.inter + strip * kStrip + 4 * lane, false, g);
    }
}

template <int MT> __global__ void __launch_bounds__(kThreads, kResident<MT>) down_kernel(const __grid_constant__ MoeArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Slot<MT> slot;
    cg::cluster_group cluster = cg::this_cluster();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, strip = blockIdx.y, ranks = cluster.num_blocks(), rank = cluster.block_rank();
    cudaTriggerProgrammaticLaunchCompletion();
    if (!locate<MT>(args, blockIdx.z, slot)) return;
    cluster.barrier_arrive();
    int first, last;
    share(args.inter / kStrip, ranks, rank, first, last);
    half* xs = reinterpret_cast<half*>(shared + Shared<MT>::xs);
    float* inbox = reinterpret_cast<float*>(shared + Shared<MT>::inbox);
    const half* svh = args.down.svh + static_cast<long>(slot.expert) * args.hidden + strip * kStrip;
    prefetch_halves(svh, kStrip);

    const int pitch = pitch_of<MT>(args.tokens * args.top <= kPairs, slot.rows);
    float acc[MT / 8][4] = {};
    auto copy = [&](int block, int count) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(args.activated) + block * kStrip;
        rotate_rows<MT>(xs, nullptr, false, pitch, slot.rows, count, warp, lane,
                        [&](int row) { return x + static_cast<long>(slot.pair[row]) * args.inter; });
    };
    dispatch(args.down.k2, args.down.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value;
        multiply<K2, CB, MT>(acc, strip_of(args.down, slot.expert, strip, args.inter, args.hidden, Rate<K2>::bytes), first, last, slot.rows,
                             pitch, warp, shared + warp * kRingBytes, xs, lane, [] { cudaGridDependencySynchronize(); }, copy);
    });
    const uint2 own_svh = raw4(svh, 4 * lane);
    cluster.barrier_wait();
    send<MT>(cluster, acc, inbox, slot.rows, warp, lane);
    cluster.sync();
    for (int row = rank + ranks * warp; row < slot.rows; row += ranks * kWarps) {
        float v[4] = {}, scale[4];
        receive(inbox, row, 0, ranks, 1, lane, v);
        hadamard(v, lane);
        unpack4(own_svh, false, scale);
        *reinterpret_cast<float4*>(args.down_rows + static_cast<long>(slot.pair[row]) * args.hidden + strip * kStrip + 4 * lane) =
            make_float4(v[0] * scale[0], v[1] * scale[1], v[2] * scale[2], v[3] * scale[3]);
    }
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ MoeArgs args) {
    const int token = blockIdx.y, i = 4 * (blockIdx.x * kThreads + threadIdx.x);
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
    int halves, size;  // blocks that share the inputs
    cudaError_t error = cluster_size(2 * slots * inner, outer, Shared<MT>::bytes, 4, halves);
    if (error == cudaSuccess) error = cluster_size(slots * outer, inner, Shared<MT>::bytes, 8, size);
    if (error == cudaSuccess && pairs > kPairs) {
        route_kernel<<<1, kSortThreads, 0, stream>>>(args, MT);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess) error = launch(gate_up_kernel<MT>, dim3(2 * halves, inner, slots), Shared<MT>::bytes, 2 * halves, stream, args);
    if (error == cudaSuccess) error = launch(down_kernel<MT>, dim3(size, outer, slots), Shared<MT>::bytes, size, stream, args);
    if (error != cudaSuccess) return error;
    return launch(sum_kernel, dim3((args.hidden + 4 * kThreads - 1) / (4 * kThreads), args.tokens), 0, 1, stream, args);
}

}  // namespace exl3

// Taller slots once an expert has more than four rows on average: the tail of a crowd that the lower ones would decode again.
extern "C" int exl3_moe(const exl3::MoeArgs* args, cudaStream_t stream) {
    return args->tokens * args->top > exl3::kPairs && args->tokens * args->top > 4 * args->experts ? exl3::run<32>(*args, stream)
                                                                                                   : exl3::run<8>(*args, stream);
}
