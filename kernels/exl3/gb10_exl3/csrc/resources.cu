// SPDX-License-Identifier: Apache-2.0
// Dynamic shared memory of each kernel by its name in the resource report; -1 for a name that is none.
#include "strip.cuh"
#include <cstring>

namespace {
struct Entry { const char* kernel; int bytes; };
constexpr Entry kTable[] = {
    {"linear<8>", exl3::Shared<8>::bytes},   {"linear<16>", exl3::Shared<16>::bytes},  {"linear<32>", exl3::Shared<32>::bytes},
    {"linear<64>", exl3::Shared<64>::bytes}, {"gate_up<8>", exl3::Shared<8>::bytes},   {"gate_up<32>", exl3::Shared<32>::bytes},
    {"down<8>", exl3::Shared<8>::bytes},     {"down<32>", exl3::Shared<32>::bytes},    {"route", 0},
    {"sum", 0}, {"dense", 0}, {"engram", 0},
};
}  // namespace

extern "C" int exl3_shared_bytes(const char* kernel) {
    for (const Entry& entry : kTable)
        if (!std::strcmp(entry.kernel, kernel)) return entry.bytes;
    return -1;
}
