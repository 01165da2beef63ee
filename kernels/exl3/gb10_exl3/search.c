// SPDX-License-Identifier: Apache-2.0
// Trellis search on the CPU: the states of a ring that decode closest to 256 targets. The path must close, which takes two
// sweeps: one from the middle of the ring with a free start, to choose the node between positions 255 and 0; and one from
// position 0 that begins and ends there. Ties go to the lowest number, so that the result is the same on every machine.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#define L 256
static void sweep(const float* restrict tab, const float* restrict w, const int* D, int start, long node,
                  uint8_t* restrict back, float* restrict cost, float* restrict e)
{
    for (int s = 0; s < L; ++s) {
        const int i = (start + s) & (L - 1), din = D[i], dout = D[(i + 1) & (L - 1)];
        const uint32_t E = 65536u >> dout, I = 65536u >> din, run = 1u << din;
        uint8_t* restrict bk = back + (size_t) i * 32768;
        const float wi = w[i];
        /* e[state] = squared error + cost of the node above */
        for (uint32_t n = 0; n < I; ++n) {
            const float c = s ? cost[n] : ((node < 0 || (long) n == node) ? 0.0f : INFINITY);
            for (uint32_t q = 0; q < run; ++q) e[n * run + q] = c;
        }
        for (uint32_t q = 0; q < 65536; ++q) { const float d = tab[q] - wi; e[q] += d * d; }
        /* best of the 2^dout states that end in the same node */
        for (uint32_t o = 0; o < E; ++o) { cost[o] = e[o]; bk[o] = 0; }
        for (uint32_t t = 1; t < (1u << dout); ++t) {
            const float* restrict et = e + t * E;
            for (uint32_t o = 0; o < E; ++o) {
                const int less = et[o] < cost[o];
                cost[o] = less ? et[o] : cost[o];
                bk[o] = less ? (uint8_t) t : bk[o];
            }
        }
    }
}
void viterbi(const float* tab, const float* tiles, long n, const int* D, uint16_t* out)
{
    #pragma omp parallel
    {
        uint8_t* back = malloc((size_t) L * 32768);
        float* c0 = malloc(32768 * 4); float* c1 = malloc(65536 * 4);
        #pragma omp for schedule(dynamic, 1)
        for (long t = 0; t < n; ++t) {
            const float* w = tiles + t * L; uint16_t* o = out + t * L;
            sweep(tab, w, D, L / 2, -1, back, c0, c1);
            uint32_t E = 65536u >> D[L / 2], node = 0;
            for (uint32_t q = 1; q < E; ++q) if (c0[q] < c0[node]) node = q;
            for (int s = L - 1; s >= 0; --s) {
                int i = (L / 2 + s) & (L - 1), dout = D[(i + 1) & (L - 1)];
                uint32_t st = ((uint32_t) back[(size_t) i * 32768 + node] << (16 - dout)) | node;
                node = st >> D[i];
                if (i == 0) break;
            }
            sweep(tab, w, D, 0, node, back, c0, c1);
            for (int i = L - 1; i >= 0; --i) {
                int dout = D[(i + 1) & (L - 1)];
                uint32_t st = ((uint32_t) back[(size_t) i * 32768 + node] << (16 - dout)) | node;
                o[i] = st; node = st >> D[i];
            }
        }
        free(back); free(c0); free(c1);
    }
}
