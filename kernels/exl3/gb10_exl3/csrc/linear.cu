// SPDX-License-Identifier: Apache-2.0
// y = rotate(rotate(x * suh) W) * svh + bias for up to kShards matrices of one input, in one launch.
//
// One cluster per strip of 128 outputs; its blocks share the inputs and add their sums through distributed shared memory,
// in a fixed order. No block waits for one outside its cluster, and nothing is kept between launches.
#include "strip.cuh"

namespace exl3 {

constexpr int kShards = 8;
struct Shard {
    const uint8_t* trellis;
    const half *suh, *svh;
    int k2, codebook, first_strip, strips;
};
struct LinearArgs {
    const void* x;
    void* y;
    const half* bias;  // or null
    long x_stride, y_stride;
    int m, k, bf16, shards;
    Shard shard[kShards];
};

template <int MT> __global__ void __launch_bounds__(kThreads, kResident<MT>) linear_kernel(const __grid_constant__ LinearArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    cg::cluster_group cluster = cg::this_cluster();
    cluster.barrier_arrive();
    cudaTriggerProgrammaticLaunchCompletion();  // the next kernel may begin to load where there is room
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, ranks = cluster.num_blocks(), rank = cluster.block_rank();
    const int strip = blockIdx.y, row0 = blockIdx.z * MT, rows = min(MT, args.m - row0);
    int s = 0;
    while (s + 1 < args.shards && strip >= args.shard[s + 1].first_strip) ++s;
    const Shard& shard = args.shard[s];
    const int local = strip - shard.first_strip;
    int first, last;
    share(args.k / kStrip, ranks, rank, first, last);
    half* xs = reinterpret_cast<half*>(shared + Shared<MT>::xs);
    float* inbox = reinterpret_cast<float*>(shared + Shared<MT>::inbox);
    prefetch_halves(shard.suh + first * kStrip, (last - first) * kStrip);
    prefetch_halves(shard.svh + local * kStrip, kStrip);

    const int pitch = pitch_of<MT>(true, rows);
    float acc[MT / 8][4] = {};
    auto started = [] { cudaGridDependencySynchronize(); };
    auto rotate = [&](int block, int count) {
        const uint16_t* x = static_cast<const uint16_t*>(args.x) + row0 * args.x_stride + block * kStrip;
        rotate_rows<MT>(xs, shard.suh + block * kStrip, args.bf16, pitch, rows, count, warp, lane, [&](int row) { return x + row * args.x_stride; });
    };
    dispatch(shard.k2, shard.codebook, [&](auto rate, auto codebook) {
        constexpr int K2 = decltype(rate)::value, CB = decltype(codebook)::value;
        const Weights w = {shard.trellis + 8L * local * Rate<K2>::bytes, 8 * shard.strips * Rate<K2>::bytes};
        multiply<K2, CB, MT>(acc, w, first, last, rows, pitch, warp, shared + warp * kRingBytes, xs, lane, started, rotate);
    });
    // What the end needs is asked for before the others are waited for.
    const long out = strip * kStrip + 4 * lane;
    const uint2 svh = raw4(shard.svh, local * kStrip + 4 * lane), bias = args.bias ? raw4(args.bias, out) : make_uint2(0, 0);
    cluster.barrier_wait();
    send<MT>(cluster, acc, inbox, rows, warp, lane);
    cluster.sync();
    // The rows are dealt to the blocks of the cluster, so that many rows are added by many.
    for (int row = rank + ranks * warp; row < rows; row += ranks * kWarps) {
        float v[4] = {}, scale[4], offset[4];
        receive(inbox, row, 0, ranks, 1, lane, v);
        hadamard(v, lane);
        unpack4(svh, false, scale);
        unpack4(bias, false, offset);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = v[e] * scale[e] + offset[e];
        store4(args.y, (row0 + row) * args.y_stride + out, args.bf16, v);
    }
}

template <int MT> cudaError_t run(const LinearArgs& args, int strips, cudaStream_t stream) {
    const int slabs = (args.m + MT - 1) / MT;
    int cluster;
    const cudaError_t error = cluster_size(strips * slabs, args.k / kStrip, Shared<MT>::bytes, 8, cluster);
    if (error != cudaSuccess) return error;
    return launch(linear_kernel<MT>, dim3(cluster, strips, slabs), Shared<MT>::bytes, cluster, stream, args);
}

}  // namespace exl3

extern "C" int exl3_linear(const exl3::LinearArgs* args, cudaStream_t stream) {
    using namespace exl3;
    const Shard& end = args->shard[args->shards - 1];
    const int strips = end.first_strip + end.strips;
    if (args->m <= 8) return run<8>(*args, strips, stream);
    if (args->m <= 16) return run<16>(*args, strips, stream);
    if (args->m <= 32) return run<32>(*args, strips, stream);
    return run<64>(*args, strips, stream);
}
extern "C" const char* exl3_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
