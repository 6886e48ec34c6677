// SPDX-License-Identifier: Apache-2.0
// Small work beside attention, for the host and for CUDA: each job is one function of an index in
// [0, count()), and calls of it are independent.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_EVERYWHERE __host__ __device__
#else
#define TESSERA_EVERYWHERE
#endif

namespace tessera::nvte {

// int32 or int64 numbers, such as cu_seqlens.
struct Integers {
  const void* data;
  bool wide;  // int64
  TESSERA_EVERYWHERE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  // Modulo 2^64: entries may be anything.
  TESSERA_EVERYWHERE int64_t length(int64_t n) const {
    return static_cast<int64_t>(static_cast<uint64_t>((*this)[n + 1]) -
                                static_cast<uint64_t>((*this)[n]));
  }
};

// Modulo 2^64, of entries that may be anything; what comes of it is compared with extents.
TESSERA_EVERYWHERE inline int64_t sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
TESSERA_EVERYWHERE inline int64_t difference(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// lengths[n] = cu_seqlens[n + 1] - cu_seqlens[n], n < b; INT32_MIN, which no call
// takes, for what int32 does not hold.
struct LengthsJob {
  Integers cu_seqlens;
  int32_t* lengths;
  int64_t b;

  TESSERA_EVERYWHERE int64_t count() const { return b; }
  TESSERA_EVERYWHERE void operator()(int64_t n) const {
    const int64_t length = cu_seqlens.length(n);
    const auto narrow = static_cast<int32_t>(length);
    lengths[n] = narrow == length ? narrow : INT32_MIN;
  }
};

// The usual ALiBi slopes, 2^(-8i/n) for a power of two n; for other h the series of the power of
// two below it, then every other slope of the one above.
struct SlopesJob {
  float* slopes;
  int64_t h;

  TESSERA_EVERYWHERE int64_t count() const { return h; }
  TESSERA_EVERYWHERE void operator()(int64_t i) const {
    int64_t power = 1;
    while (2 * power <= h) power *= 2;
    const double exponent =
        i < power ? -8.0 / static_cast<double>(power) * static_cast<double>(i + 1)
                  : -4.0 / static_cast<double>(power) * static_cast<double>(2 * (i - power) + 1);
    slopes[i] = static_cast<float>(exp2(exponent));
  }
};

// rng_state = (seed, offset), each from memory where a pointer is given, plus `more`.
struct RngStateJob {
  int64_t* rng_state;
  const int64_t *seed_at, *offset_at;  // either may be null
  int64_t seed, offset;                // where the pointer is null
  int64_t more;

  TESSERA_EVERYWHERE int64_t count() const { return 1; }
  TESSERA_EVERYWHERE void operator()(int64_t) const {
    rng_state[0] = seed_at ? *seed_at : seed;
    rng_state[1] = static_cast<int64_t>(static_cast<uint64_t>(offset_at ? *offset_at : offset) +
                                        static_cast<uint64_t>(more));
  }
};

// A piece of a row that one thread moves: 1, 2, 4 or 16 bytes, to which rows are aligned.
struct alignas(16) Sixteen {
  int64_t half[2];
};
TESSERA_EVERYWHERE inline void move_piece(char* to, const char* from, int64_t bytes) {
  switch (bytes) {
    case 16:
      *reinterpret_cast<Sixteen*>(to) = *reinterpret_cast<const Sixteen*>(from);
      break;
    case 4:
      *reinterpret_cast<int32_t*>(to) = *reinterpret_cast<const int32_t*>(from);
      break;
    case 2:
      *reinterpret_cast<int16_t*>(to) = *reinterpret_cast<const int16_t*>(from);
      break;
    default:
      *to = *from;
  }
}

// Rows of tokens: row_bytes of each, moved in pieces.
struct Rows {
  int64_t row_bytes, piece_bytes;
  TESSERA_EVERYWHERE int64_t pieces() const { return row_bytes / piece_bytes; }
  TESSERA_EVERYWHERE void move(char* to, int64_t row_to, const char* from, int64_t row_from,
                               int64_t piece) const {
    const int64_t at = piece * piece_bytes;
    move_piece(to + row_to * row_bytes + at, from + row_from * row_bytes + at, piece_bytes);
  }
};

// Token i of sequence n to place old + i of its cache, old = cached - new lengths.
struct AppendJob {
  const char* from;
  char* cache;
  Rows rows;
  Integers new_lens, cached_lens;
  const int32_t* page_table;
  int64_t b, at_once, page_size, max_pages, num_pages;
  int64_t stride_b, stride_s, extent_s;  // of `from`, in rows, where it is not packed
  int64_t tokens;                        // rows of `from`
  bool packed, paged;                    // not in pages: sequence n lies in row n of the cache

  TESSERA_EVERYWHERE int64_t source(int64_t n, int64_t i) const {
    if (packed) return sum(new_lens[n], i);
    return i < extent_s ? n * stride_b + i * stride_s : -1;
  }
  // The row of the cache of a token, i < length; -1 where there is none.
  TESSERA_EVERYWHERE int64_t place(int64_t n, int64_t i) const {
    const int64_t row = source(n, i),
                  at = sum(difference(cached_lens.length(n), new_lens.length(n)), i);
    if (row < 0 || row >= tokens || at < 0 || at >= page_size * max_pages) return -1;
    const int64_t page = paged ? page_table[n * max_pages + at / page_size] : n;
    return page < 0 || page >= num_pages ? -1 : page * page_size + at % page_size;
  }
  TESSERA_EVERYWHERE int64_t count() const { return b * at_once * rows.pieces(); }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t piece = index % rows.pieces(), token = index / rows.pieces();
    const int64_t n = token / at_once;
    for (int64_t i = token % at_once; i < new_lens.length(n); i += at_once) {
      const int64_t row = place(n, i);
      if (row >= 0) rows.move(cache, row, from, source(n, i), piece);
    }
  }
};

// Sequence n of the batch was in row was[n] of the cache and goes to row n. Rows move up in the
// order of n, so a thread takes one piece of one token through all of them.
struct ReindexJob {
  char* cache;
  Rows rows;
  Integers new_lens, cached_lens;
  const int32_t* was;  // [b], increasing among sequences that have old tokens
  int64_t b, max_rows, max_seq_len;

  // Tokens of sequence n before this call.
  TESSERA_EVERYWHERE int64_t old(int64_t n) const {
    return difference(cached_lens.length(n), new_lens.length(n));
  }
  TESSERA_EVERYWHERE int64_t count() const {
    return max_rows > 0 ? max_seq_len * rows.pieces() : 0;  // a cache without rows has no memory
  }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t piece = index % rows.pieces(), token = index / rows.pieces();
    for (int64_t n = 0; n < b; ++n) {
      const int64_t from = was[n];
      if (from <= n || from >= max_rows) continue;
      if (token >= old(n)) continue;
      rows.move(cache, n * max_seq_len + token, cache, from * max_seq_len + token, piece);
    }
  }
};

// Tokens of packed sequences to or from the rows of a padded batch.
struct ConvertJob {
  const char* from;
  char* to;
  Rows rows;
  Integers cu_seqlens;
  int64_t b, max_seq_len, tokens;
  bool to_packed;

  TESSERA_EVERYWHERE int64_t count() const { return b * max_seq_len * rows.pieces(); }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t piece = index % rows.pieces(), padded = index / rows.pieces();
    const int64_t n = padded / max_seq_len, i = padded % max_seq_len;
    const int64_t packed = sum(cu_seqlens[n], i);
    if (i >= cu_seqlens.length(n) || packed < 0 || packed >= tokens) return;
    if (to_packed) {
      rows.move(to, packed, from, padded, piece);
    } else {
      rows.move(to, padded, from, packed, piece);
    }
  }
};

}  // namespace tessera::nvte
