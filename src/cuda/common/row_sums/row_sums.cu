// SPDX-License-Identifier: Apache-2.0
// Copies and sums of rows. A sum is cut into vectors of columns; each thread takes kAtOnce of them, a CTA's
// stride apart, and reads all before it writes one, so that their latencies overlap.
#include <algorithm>
#include <type_traits>

#include "cuda/common/divisor.h"
#include "cuda/common/element.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/row_sums/row_sums.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;
constexpr int kOfCta = kThreads * kAtOnce;          // vectors
constexpr int kElements = 8;                        // of a vector of a sum
constexpr int64_t kMostVectors = int64_t{1} << 30;  // of a sum in a launch: Divisor's dividends

struct Place {
  char* data;
  const int64_t* index;  // null: rows are neighbours
  int64_t row, head;     // bytes
  int dtype;
};

template <int kTerms>
struct Piece {
  Place to, term[kTerms];
  Divisor columns, heads;  // columns in vectors
  int vectors, first_cta;
  int num_terms;
  int width;  // of a vector: bytes of a copy, elements of a sum
};

template <int kTerms, int kPieces>
struct Launch {
  static constexpr int kMaxPieces = kPieces;
  int pieces;
  Piece<kTerms> piece[kPieces];
};
using Copies = Launch<1, 32>;
using Sums = Launch<TESSERA_MAX_TERMS, 10>;
static_assert(sizeof(Copies) <= 4096 &&
              sizeof(Sums) <= 4096);  // a kernel's arguments before sm70's large ones

struct Element {
  int row, head, vector;
};

template <int kTerms>
__device__ Element element_of(const Piece<kTerms>& piece, int i) {
  const int group = piece.columns.quotient(i), row = piece.heads.quotient(group);
  return {row, group - row * piece.heads.divisor, i - group * piece.columns.divisor};
}

__device__ char* address_of(const Place& place, const Element& e, int bytes) {
  const int64_t row = place.index ? place.index[e.row] : e.row;
  return place.data + row * place.row + e.head * place.head + int64_t{e.vector} * bytes;
}

// The piece that a CTA works on, and the first of its vectors.
template <typename L>
__device__ int piece_of_cta(const L& launch, int& first) {
  const int cta = static_cast<int>(blockIdx.x);
  int at = 0;
  while (at + 1 < launch.pieces && launch.piece[at + 1].first_cta <= cta) ++at;
  first = (cta - launch.piece[at].first_cta) * kOfCta + static_cast<int>(threadIdx.x);
  return at;
}

template <typename Vector>
__device__ void copy(const Piece<1>& piece, int first) {
  Vector value[kAtOnce];
  char* to[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = first + i * kThreads;
    to[i] = nullptr;
    if (at >= piece.vectors) continue;
    const Element e = element_of(piece, at);
    to[i] = address_of(piece.to, e, sizeof(Vector));
    value[i] = *reinterpret_cast<const Vector*>(address_of(piece.term[0], e, sizeof(Vector)));
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (to[i]) *reinterpret_cast<Vector*>(to[i]) = value[i];
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Copies launch) {
  int first;
  const Piece<1>& piece = launch.piece[piece_of_cta(launch, first)];
  switch (piece.width) {
    case 16:
      return copy<uint4>(piece, first);
    case 8:
      return copy<uint2>(piece, first);
    case 4:
      return copy<uint32_t>(piece, first);
    case 2:
      return copy<uint16_t>(piece, first);
    default:
      return copy<uint8_t>(piece, first);
  }
}

// kElements floats of 16-bit elements, and back.
template <typename T>
__device__ void unpack_eight(const uint4& packed, float (&x)[kElements]) {
  const uint32_t pairs[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}
template <typename T>
__device__ uint4 pack_eight(const float (&x)[kElements]) {
  return {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
}

__device__ void add_eight(const char* from, int dtype, float (&sum)[kElements]) {
  float x[kElements];
  if (dtype == TESSERA_FP32) {
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      const float4 four = reinterpret_cast<const float4*>(from)[i / 4];
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
    const uint4 packed = *reinterpret_cast<const uint4*>(from);
    if (dtype == TESSERA_BF16) {
      unpack_eight<__nv_bfloat16>(packed, x);
    } else {
      unpack_eight<__half>(packed, x);
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum[i] += x[i];
}

__device__ void store_eight(char* to, int dtype, const float (&x)[kElements]) {
  if (dtype == TESSERA_FP32) {
    reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
  } else {
    *reinterpret_cast<uint4*>(to) =
        dtype == TESSERA_BF16 ? pack_eight<__nv_bfloat16>(x) : pack_eight<__half>(x);
  }
}

__device__ int bytes_of(int dtype) { return dtype == TESSERA_FP32 ? 4 : 2; }

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sums launch) {
  int first;
  const auto& piece = launch.piece[piece_of_cta(launch, first)];
  float sum[kAtOnce][kElements] = {};
  char* to[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = first + i * kThreads;
    to[i] = nullptr;
    if (at >= piece.vectors) continue;
    const Element e = element_of(piece, at);
    to[i] = address_of(piece.to, e, piece.width * bytes_of(piece.to.dtype));
    for (int t = 0; t < piece.num_terms; ++t) {
      const Place& term = piece.term[t];
      const char* const from = address_of(term, e, piece.width * bytes_of(term.dtype));
      if (piece.width == kElements) {
        add_eight(from, term.dtype, sum[i]);
      } else {
        sum[i][0] += load_float(from, 0, term.dtype);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (!to[i]) continue;
    if (piece.width == kElements) {
      store_eight(to[i], piece.to.dtype, sum[i]);
    } else {
      store_float(to[i], 0, piece.to.dtype, sum[i][0]);
    }
  }
}

Place place_of(const RowSums& args, const tessera_rows& rows, int64_t first_row) {
  Place place{static_cast<char*>(args.tensors[rows.tensor]) + rows.offset, nullptr, rows.row,
              rows.head, rows.dtype};
  if (rows.index < 0) {
    place.data += first_row * rows.row;
  } else {
    place.index = static_cast<const int64_t*>(args.tensors[rows.index]) + first_row;
  }
  return place;
}

// Whether vectors of `bytes` can be read there.
bool has_vectors(const Place& place, const tessera_row_sum& sum, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(place.data) % static_cast<uintptr_t>(bytes) == 0 &&
         ((sum.rows == 1 && !place.index) || place.row % bytes == 0) &&
         (sum.heads == 1 || place.head % bytes == 0);
}

int width_of_copy(const Piece<1>& piece, const tessera_row_sum& sum) {
  const int64_t columns = sum.columns * size_of(sum.to.dtype);
  int width = 16;
  while (columns % width != 0 || !has_vectors(piece.to, sum, width) ||
         !has_vectors(piece.term[0], sum, width)) {
    width /= 2;
  }
  return width;
}

template <int kTerms>
int width_of_sum(const Piece<kTerms>& piece, const tessera_row_sum& sum) {
  bool vectors = sum.columns % kElements == 0 && has_vectors(piece.to, sum, 16);
  for (int t = 0; t < piece.num_terms; ++t) vectors &= has_vectors(piece.term[t], sum, 16);
  return vectors ? kElements : 1;
}

bool is_copy(const tessera_row_sum& sum) {
  return sum.num_terms == 1 && sum.term[0].dtype == sum.to.dtype;
}

// Collects pieces, and launches them when there is no room for more.
template <typename L>
class Queue {
 public:
  Queue(const void* function, cudaStream_t stream) : function_(function), stream_(stream) {}

  Status add(const RowSums& args, const tessera_row_sum& sum) {
    for (int64_t row = 0; row < sum.rows;) {
      if (launch_.pieces == L::kMaxPieces) TESSERA_RETURN_IF_ERROR(flush());
      auto& piece = launch_.piece[launch_.pieces];
      piece.to = place_of(args, sum.to, row);
      piece.num_terms = sum.num_terms;
      for (int t = 0; t < sum.num_terms; ++t) piece.term[t] = place_of(args, sum.term[t], row);
      int64_t columns;  // vectors
      if constexpr (std::is_same_v<L, Copies>) {
        piece.width = width_of_copy(piece, sum);
        columns = sum.columns * size_of(sum.to.dtype) / piece.width;
      } else {
        piece.width = width_of_sum(piece, sum);
        columns = sum.columns / piece.width;
      }
      const int64_t of_row = columns * sum.heads;
      if (of_row > kMostVectors) {
        return Status(TESSERA_REFUSED,
                      "sums: a row of more than 2^30 vectors is not summed on CUDA");
      }
      const int64_t rows = std::min(sum.rows - row, kMostVectors / of_row);
      piece.columns = Divisor::of(static_cast<int>(columns));
      piece.heads = Divisor::of(static_cast<int>(sum.heads));
      piece.vectors = static_cast<int>(rows * of_row);
      piece.first_cta = ctas_;
      ctas_ += (piece.vectors + kOfCta - 1) / kOfCta;
      ++launch_.pieces;
      row += rows;
    }
    return {};
  }

  Status flush() {
    if (launch_.pieces == 0) return {};
    const dim3 grid(static_cast<unsigned>(ctas_));
    const Status status =
        launch_kernel("sum_rows", function_, grid, kThreads, 0, &launch_, stream_);
    launch_.pieces = ctas_ = 0;
    return status;
  }

 private:
  L launch_{};
  int ctas_ = 0;
  const void* function_;
  cudaStream_t stream_;
};

}  // namespace

Status sum_rows(const RowSums& args, const Buffers& context, const Device& device) {
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const auto stream = static_cast<cudaStream_t>(context.stream);
  Queue<Copies> copies(reinterpret_cast<const void*>(&copy_kernel), stream);
  Queue<Sums> sums(reinterpret_cast<const void*>(&sum_kernel), stream);
  for (int64_t i = 0; i < args.num_sums; ++i) {
    const tessera_row_sum& sum = args.sums[i];
    if (sum.rows == 0 || sum.heads == 0 || sum.columns == 0) continue;
    TESSERA_RETURN_IF_ERROR(is_copy(sum) ? copies.add(args, sum) : sums.add(args, sum));
  }
  TESSERA_RETURN_IF_ERROR(copies.flush());
  return sums.flush();
}

}  // namespace tessera::cuda
