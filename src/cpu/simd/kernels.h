// SPDX-License-Identifier: Apache-2.0
// Kernels: what one instruction set offers to this folder's host code.
//
// Each level is one translation unit, kernels_<level>.cc, compiled with that level's flags and
// holding the same templates (forward/kernel.h, decode/dot.h, backward/kernel.h) instantiated for
// its trait struct of simd/. Everything in it has internal linkage but its one table, so that the
// linker can never hand an AVX-512 copy of a shared function to an older machine. These units
// therefore include no header of the C++ library and call nothing of core/ but its always-inlined
// functions: host code (forward/host.cc, backward/host.cc, ...) resolves the problem into plain
// structs of arguments first.
//
// How a pass plugs in (backward as the example):
//   backward/args.h  struct BackwardArgs, plain data, and enum class BackwardPhase : int
//   backward/kernel.h       template <typename S> void backward_task(const BackwardArgs&,
//   BackwardPhase,
//                    int64_t task, char* scratch), in an unnamed namespace
//   simd/kernels_table.h  its line in make_kernels<S>()
//   backward/host.cc      host code: workspace, order of the tasks, parallel_for over
//   kernels().backward
#pragma once

#include <cstdint>

namespace tessera::cpu {

struct ForwardArgs;
struct ForwardShape;
struct BackwardArgs;
enum class BackwardPhase : int;

struct Kernels {
  const char* name;   // "amx", "avx512bf16", "avx512", "avx2", "portable"
  int strip;          // queries of a strip: two vectors
  int block;          // keys of a block
  int decode_block;   // keys of a block of few queries
  bool has_bf16_dot;  // bf16 q, k, v are multiplied as they are; otherwise as fp32

  // task is an index into the arguments' list of tasks; scratch is this worker's alone, 64-byte
  // aligned, of as many bytes as the arguments say. They allocate nothing and do not throw.
  int64_t (*forward_scratch_bytes)(const ForwardShape& shape);
  int64_t (*forward_partial_bytes)(const ForwardShape& shape);
  void (*forward)(const ForwardArgs& args, int64_t task, char* scratch);
  int64_t (*backward_scratch_bytes)(const BackwardArgs& args);  // reads shapes only
  void (*backward)(const BackwardArgs& args, BackwardPhase phase, int64_t task, char* scratch);

  // sum += weight row; row = sum, rounded. n elements of fp32, bf16 or fp16.
  void (*add_row)(int32_t dtype, const void* row, int64_t n, float weight, float* sum);
  void (*round_row)(int32_t dtype, const float* sum, int64_t n, void* row);
};

// The best level that this machine has, or the one that TESSERA_CPU_ISA names if the machine has
// it; found once, at the first call.
const Kernels& kernels();

// True if this machine looks up bytes in tables of 128 (AVX512_VBMI), which no level takes for
// granted: avx512bf16 then widens rows of fp8 to bf16.
bool has_byte_tables();

// The table of a level by name, or null if the machine cannot run it or there is no such level.
const Kernels* kernels_of(const char* name);

// Levels in order of preference; null past the last one that this build has.
const Kernels* kernels_at(int index);

}  // namespace tessera::cpu
