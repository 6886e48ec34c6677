// SPDX-License-Identifier: Apache-2.0
// The data of a case: every input tensor filled from (seed, number, index) alone, so that another
// implementation can reproduce it from core/case/draw.h and this list.
//
// Floating tensors (q 0, k 1, v 2, do 3, bias 4, sink 5, slopes 6, dlse 7): element e is N(0, 1),
// rounded to the dtype; e is the index in C order over the extents in the order of enum
// tessera_index (an expanded axis counts as extent 1). A packed tensor's gaps and a pool's unused
// pages count like any other element. k_scale of kv head h is 0.5 + (h % 4) / 4, v_scale is
// 1.5 - (h % 4) / 4; where scales have more axes, h is the element in C order, and the other scales
// are k_scale's. rng_state is (seed, 0), and the two numbers of rng= behind them. data= changes q,
// k, v and do: outliers, 1 of 1000 elements is 11 times as large; positive, absolute values;
// channels, every 21st column of k has mean 12; sink, key 0 is 4 times as large; opposed, k has mean
// -m, and m = sqrt(120 / sqrt(dqk)) that of q's rows (the token or row of a sequence) 0 to 39 of 80.
//
// Integers (w2 of the counter `index`, modulo the range) and probabilities (w3):
//   mask 8      index = C-order element of the mask's own extents; visible with probability P.
//               blocks: index = ((n H + h) ceil(Q / 64) + i / 64) ceil(K / 64) + j / 64, where
//               H, Q, K are the mask's extents.
//   starts 13   seed of the token: core/case/geometry.cc. shift 14 and windows 20 likewise.
//   other part  of partial, see below: its lse 16, its o 17. held 18: of accumulate, see below.
//   ranges 9    seed of the token. Interval r of row e (C order over the extents without the last):
//               index 2r', r' = intervals * e + r; K = sk (thd, pages: the case's sk):
//               start = draw(2r') mod (K + 1) - K / 4,
//               end = start - 2 + draw(2r' + 1) mod (K + 3).
//               prefix:N is [0, max(N, i + 1)) for position i.
//   lengths 10  seed of the token: core/case/geometry.cc. 0..s, of lens=: 0..min(sq, sk).
//               Gaps 0..16.
//   pages 11    table t (k 0, v 1): the pages of its pool shuffled by Fisher and Yates, for i from
//               last to 1: swap(i, draw(t 2^32 + i) mod (i + 1)); sequence n takes the next
//               max_pages of them. Then sequence 1 takes the first page of sequence 0: they share a
//               prefix.
//   segments 12 sequence n of extent S (thd: true length) is cut at N - 1 points,
//               draw(n (N - 1) + c) mod (S + 1); a token's id is 1 less the number of cuts at or
//               before it. again:N: 3 N - 1 cuts, and their number is taken mod N. random:N: of
//               token i, draw(n 2^32 + i) mod N instead of cuts; both sides draw the same.
#pragma once

#include "core/case/case.h"

namespace tessera {

// Fills every input but o and lse. Every element of a tensor gets its value, but with poison those
// outside the logical problem are left as they are. Bytes between strided rows are never touched.
// Lengths and tables are always right where they are read.
void fill_inputs(const Case& c, const CaseGeometry& geometry, const Buffers& buffers);

// o and lse of a part -> those of its union with another part, of partial. Row r of o, [rows, dv],
// has element statistic_of_row[r] of lse, -1: none, the row stays. The other part's lse is N(0, 1)
// more than this one's, and another 1000 more for every eighth element; its o is N(0, 1).
void join_other_part(const Case& c, int64_t dv, std::vector<double>& o, std::vector<double>& lse,
                     const std::vector<int64_t>& statistic_of_row);

// What the outputs of accumulate hold before the call: N(0, 1), element e of output `index` from
// counter index 2^40 + e / 2 of tensor 18. lse is ln(1 + sk) more, of every eighth element another
// 1000 (the call's keys weigh nothing), of every eighth -inf: there o is left as it is, unread.
void fill_held(const Case& c, const CaseGeometry& geometry, const Buffers& buffers);

// True if a row of q (and o, do, lse, dlse) is inside its sequence: [batch][row] in storage.
std::vector<bool> valid_query_rows(const CaseGeometry& geometry);

}  // namespace tessera
