// SPDX-License-Identifier: Apache-2.0
// Dynamic shared memory of each kernel by its name in the resource report; -1 for a name that is none.
#include "strip.cuh"
#include <cstring>

namespace {
struct Entry { const char* kernel; int bytes; };
constexpr Entry kTable[] = {
    {"linear<8>", exl3::shared_bytes<8>(1, 1)},   {"linear<16>", exl3::shared_bytes<16>(1, 1)}, {"linear<32>", exl3::shared_bytes<32>(1, 1)},
    {"linear<64>", exl3::shared_bytes<64>(1, 1)}, {"gate_up<8>", exl3::shared_bytes<8>(2, 2)},  {"down<8>", exl3::shared_bytes<8>(2, 1)},
    {"sum", 0}, {"dense", exl3::kDenseBytes}, {"engram", 0},
};
}  // namespace

extern "C" int exl3_shared_bytes(const char* kernel) {
    for (const Entry& entry : kTable)
        if (!std::strcmp(entry.kernel, kernel)) return entry.bytes;
    return -1;
}
